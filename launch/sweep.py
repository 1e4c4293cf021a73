"""Trains one run per value of a config field, and shows that they differ in nothing else.

    python launch/sweep.py --config=configs/quickstart.py --workdir=W --rope_percentage=0,0.25,0.5,0.75,1
    python launch/sweep.py --config=.. --workdir=W --grid=seed=0,1,2 --grid=model.rope_percentage=0,0.75,1

Runs are made one after the other, in W/rope_percentage=0.25 and so on. Started again with the same arguments it skips
finished runs and resumes the others; with more values it adds runs. Without --grid it takes the config file's own grid,
if that has a function get_sweep(). --config.FIELD=VALUE goes to every run.

--backend hands the runs to a launcher, whose flags come after --:

    python launch/sweep.py .. --backend=tpu_vm -- --name=N --zone=Z --type=v5p-128                  one after the other
    python launch/sweep.py .. --backend=gke -- --image=I --type=v5p --topology=4x4x4 --claim=C      all into the cluster
    python launch/sweep.py .. --backend=slurm -- --nodes=8 --gpus-per-node=8 --exclusive            all into the queue

With --wait among its flags, gke and slurm take one run after the other as well.
"""

import sys

import jax
from absl import flags
from ml_collections import config_flags

from prope import command
from prope.errors import UsageError
from prope.sweep.execute import BACKENDS, run_sweep
from prope.sweep.grid import plan, read_grid


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "config file of all runs, such as configs/quickstart.py")
    flags.DEFINE_string("workdir", None, "directory of the sweep; a run's directory is below it")
    flags.DEFINE_string("rope_percentage", None, "values of config.model.rope_percentage: 0,0.25,0.5,0.75,1")
    flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE: a config field and its values; may be given again")
    flags.DEFINE_enum("backend", "local", BACKENDS, "what makes the runs; its own flags come after --")
    flags.DEFINE_boolean("dry-run", False, "print the commands, one a line, and run nothing")
    flags.mark_flags_as_required(["config", "workdir"])


def main(given_to_launcher: list[str]) -> dict:
    """The command."""
    given = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # this process reads files; the accelerator is for its runs
    if given.backend == "local" and given_to_launcher:
        raise UsageError(f"{given_to_launcher[0]}: flags after -- are a launcher's; --backend=local has none")
    if given.backend in ("gke", "slurm"):
        for flag in given_to_launcher:
            if flag.startswith(("--name", "--job-name")):
                raise UsageError(
                    f"{flag}: every run gets a name of its own, made of the workdir's and its values; remove it"
                )
    file = config_flags.get_config_filename(given["config"])
    base, overrides = given.config, config_flags.get_override_values(given["config"])
    grid = read_grid(given.grid, given.rope_percentage, file, base, overrides)
    runs = plan(grid, file, base, overrides)
    about = {"config_file": file, "overrides": overrides}
    return run_sweep(given.workdir, runs, grid, base, about, given.backend, given_to_launcher, given["dry-run"].value)


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    launcher_flags = sys.argv[end + 1 :]
    del sys.argv[end:]
    command.run(lambda: main(launcher_flags), define_flags)
