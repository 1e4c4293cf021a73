"""Chooses which pairs of a checkpoint must rotate, by key head, by what they change.

    python -m prope.choose --workdir=runs/smollm2 --keep=0.5 --dataset=files --data_dir=TEXTS
    python -m prope.evaluate --workdir=runs/smollm2 --pairs=runs/smollm2/pairs.json --seq_len=4x ..
    python -m prope.train --config=runs/smollm2/config.json --init_from=runs/smollm2 ..
        --config.model.rope_pairs=runs/smollm2/pairs.json

A rule scores every pair: change, by how much the scores of attention change where it stands; norm,
by |q| |k|; fast is p-RoPE; slow and uniform are controls. Norms are measured on beginnings of
training documents. W/pairs.json has the choice, W/pairs.png draws it. The run is then evaluated on
validation documents as it is, with the choice, and with p-RoPE of as many pairs; nothing is
trained. --rule=change,norm --keep=0.5,0.25 compares all of these: each
has a file, such as W/pairs_norm_head_0.25.json.
"""

from absl import flags

from prope import command
from prope.inference import options


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of a run whose pairs all rotate")
    rules = "what a pair is scored by: change, norm, fast, slow or uniform; several are compared"
    flags.DEFINE_list("rule", ["change"], rules)
    flags.DEFINE_list("keep", ["0.5"], "share of the pairs that rotate, or several")
    per = "whose pairs are chosen together: a key head's, a layer's, the same for its heads, or "
    per += "those of the model; or several"
    flags.DEFINE_list("per", ["head"], per)
    flags.DEFINE_integer("step", None, "checkpoint; the newest by default", lower_bound=0)
    flags.DEFINE_integer(
        "sequences", 16, "number of documents whose beginnings are measured", lower_bound=1
    )
    seq_len = "tokens of these, and of the windows of evaluation; the training length by default"
    flags.DEFINE_integer("seq_len", None, seq_len, lower_bound=3)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    command.define_place("data_dir", "folder of the dataset, as in config.data.data_dir")
    command.define_place("text", "file to measure instead of documents")
    windows = "validation windows to evaluate, evenly spread; all by default"
    flags.DEFINE_integer("max_windows", None, windows, lower_bound=1)
    options.define_dtype()
    command.define_place("output", "folder for the results instead of --workdir")
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Chooses and evaluates; returns the losses and the file of the pairs."""
    from prope.analysis.pairs import choose_pairs

    return choose_pairs(flags.FLAGS)


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
