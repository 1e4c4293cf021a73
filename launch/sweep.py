"""Trains one run per value of a config field, and checks that the runs differ in nothing else.

    python launch/sweep.py --config=configs/quickstart.py --workdir=W --rope_percentage=0,0.25,0.5,0.75,1
    python launch/sweep.py --config=configs/quick_sweep.py --workdir=W --grid=seed=0,1 --grid=model.rope_percentage=0,1

Runs are trained one after the other, in W/rope_percentage=0.25 and so on. Rerun the same command to skip finished runs
and resume the others; more values add runs. Without --grid the config file's own grid is used, its get_sweep().
--config.FIELD=VALUE applies to every run. --backend passes the runs to a launcher, whose flags come after --:

    python launch/sweep.py .. --backend=tpu_vm -- --name=N --zone=Z --type=v5p-128            one after the other
    python launch/sweep.py .. --backend=gke -- --image=I --type=v5p --topology=4x4x4          all into the cluster
    python launch/sweep.py .. --backend=slurm -- --nodes=8 --gpus-per-node=8 --exclusive      all into the queue
    python launch/sweep.py .. --backend=sky -- --gpus=tpu-v5p-128                             all as managed jobs

With --wait among its flags, gke, slurm and sky also run one after the other. W is a bucket's URL, or a folder that the
machines share. The lock, and what was handed out, are on this machine: in ~/.cache/prope/sweeps.
"""

import sys

from absl import flags
from ml_collections import config_flags

from prope import command
from prope.errors import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags."""
    config_flags.DEFINE_config_file(
        "config", None, "config file of all runs, such as configs/quickstart.py"
    )
    flags.DEFINE_string(
        "workdir", None, "folder or URL of the sweep; every run has a folder below it"
    )
    flags.DEFINE_string(
        "rope_percentage", None, "values of config.model.rope_percentage, as in 0,0.25,0.5,0.75,1"
    )
    flags.DEFINE_multi_string("grid", [], "a config field and its values, FIELD=VALUE,VALUE")
    backends = ["local", "tpu_vm", "gke", "slurm", "sky"]
    flags.DEFINE_enum(
        "backend", "local", backends, "what trains the runs; its own flags come after --"
    )
    flags.DEFINE_boolean("dry-run", False, "print the commands, one per line, and run nothing")
    flags.mark_flags_as_required(["config", "workdir"])


def main(launcher_flags: list[str]) -> dict:
    """Trains the runs; returns them and their table."""
    import jax

    from prope.sweep.execute import run_sweep
    from prope.sweep.grid import read_grids

    jax.config.update(
        "jax_platforms", "cpu"
    )  # this process reads files; the accelerator is for its runs
    if FLAGS.backend == "local" and launcher_flags:
        raise UsageError(
            f"{launcher_flags[0]}: flags after -- are a launcher's; --backend=local has none"
        )
    if FLAGS.backend in ("gke", "slurm", "sky"):
        for flag in launcher_flags:
            if flag.startswith(("--name", "--job-name")):
                raise UsageError(
                    f"{flag}: every run gets a name of its own, from its values; remove it"
                )
    file = config_flags.get_config_filename(FLAGS["config"])
    base, overrides = FLAGS.config, config_flags.get_override_values(FLAGS["config"])
    grids = read_grids(FLAGS.grid, FLAGS.rope_percentage, file, base, overrides)
    dry_run = FLAGS["dry-run"].value
    return run_sweep(
        FLAGS.workdir, file, base, overrides, grids, FLAGS.backend, launcher_flags, dry_run
    )


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    launcher_flags = sys.argv[end + 1 :]
    del sys.argv[end:]
    command.run(lambda: main(launcher_flags), define_flags, uses_devices=False)
