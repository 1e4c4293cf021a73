"""Trains one run per value of a config field, and checks that the runs differ in nothing else.

    python launch/sweep.py --config=configs/quickstart.py --workdir=W --rope_percentage=0,0.5,1
    python launch/sweep.py --config=configs/quick_sweep.py --workdir=W --grid=seed=0,1
    python launch/sweep.py .. --launcher="sbatch --wait --nodes=8 .. launch/slurm.sbatch --"

The runs are trained here one after the other, or --jobs=N at a time, in W/rope_percentage=0.25 and
so on. Rerun the same command to skip finished runs and resume the others; more values add runs.
Several --grid sweep the product of their values; without --grid the config file's own grid is used,
its get_sweep(). --config.FIELD=VALUE applies to every run, as does --init_from.
--init_from="S/seed={seed}" begins each run from that of its own seed.

Each of N runs at a time has an equal share of the GPUs (CUDA_VISIBLE_DEVICES) or, without any, of
the cores, and its name before the lines of its log. Programs that are compiled once are shared.

--launcher hands the command of each run to another command, as its last words. Where the launcher
has {command}, that becomes the run's command as one text, quoted for a shell; {name} becomes a
name for the run, of at most 40 small letters, digits and hyphens. W is a bucket's URL, or a folder
that this machine shares with those that train.

A launcher that exits with 0 has taken the run, or the run has ended. With another exit code the
run is not going on. A run that was taken has a file W/launched/RUN and is not started twice; to
start it again, see that it has ended, then remove the file.
"""

from absl import flags
from ml_collections import config_flags

from prope import command

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags."""
    config_flags.DEFINE_config_file(
        "config", None, "config file of all runs, such as configs/quickstart.py"
    )
    command.define_place("workdir", "folder or URL of the sweep; every run has a folder below it")
    flags.DEFINE_string(
        "rope_percentage", None, "values of config.model.rope_percentage, as in 0,0.25,0.5,0.75,1"
    )
    flags.DEFINE_multi_string("grid", [], "a config field and its values, FIELD=VALUE,VALUE")
    flags.DEFINE_string(
        "launcher", None, "command that each run's command is handed to; launch/README.md has some"
    )
    begin = "start every run from the parameters of this one; {seed} becomes the run's seed"
    command.define_place("init_from", begin, by_seed=True)
    at_a_time = "runs that are trained here at a time"
    flags.DEFINE_integer("jobs", 1, at_a_time, lower_bound=1)
    flags.DEFINE_boolean("dry-run", False, "print the commands, one per line, and run nothing")
    flags.mark_flags_as_required(["config", "workdir"])


def main() -> dict:
    """Trains the runs; returns them and their table."""
    import jax

    from prope.sweep.execute import run_sweep
    from prope.sweep.grid import read_grids

    # This process only reads files; the accelerator is for its runs.
    jax.config.update("jax_platforms", "cpu")
    file = config_flags.get_config_filename(FLAGS["config"])
    base = FLAGS.config
    overrides = config_flags.get_override_values(FLAGS["config"])
    grids = read_grids(FLAGS.grid, FLAGS.rope_percentage, file, base, overrides)
    return run_sweep(
        FLAGS.workdir,
        file,
        base,
        overrides,
        grids,
        launcher=FLAGS.launcher,
        dry_run=FLAGS["dry-run"].value,
        init_from=FLAGS.init_from,
        jobs=FLAGS.jobs,
    )


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
