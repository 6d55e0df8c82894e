"""Train with BAPO: ``python -m recipe.bapo.main_bapo [--config-dir configs] [key=value ...]``.

The console gets a line per step and a summary; what verl and Ray print goes to ``train.log`` in the run's folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import hydra
import ray
from omegaconf import OmegaConf, open_dict

logging.disable(logging.INFO)  # verl announces its platform on import
import verl  # noqa: E402, F401  before anything of ours: it loads our plugin
from recipe.bapo import config as _resolvers  # noqa: E402, F401
from recipe.bapo import plugin  # noqa: E402, F401
from recipe.bapo.checks import table  # noqa: E402
from recipe.bapo.checks.other_runs import claim_machine, joins_a_cluster  # noqa: E402
from recipe.bapo.launch import console, live, processes  # noqa: E402
from recipe.bapo.launch.watchdog import Watchdog  # noqa: E402
from recipe.bapo.records import CONFIG, LOG, PICTURE, RAY_LOGS, VALIDATION, validation  # noqa: E402
from recipe.bapo.records.checkpoints import latest_checkpoint  # noqa: E402
from verl.trainer.main_ppo import run_ppo  # noqa: E402

logging.disable(logging.NOTSET)


@hydra.main(config_path="config", config_name="bapo_trainer", version_base=None)
def main(config):
    """Check, train, sum up; end with exit code 1 and a few lines that name the cause if anything fails."""
    run_dir = Path(config.run_dir).absolute()
    log_file = run_dir / LOG
    end_on(signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        end_on(signal.SIGHUP)
    with console.output_to(log_file) as out:
        message, code = run_and_clean_up(config, run_dir, out)
    if message is not None:
        print(f"Error: {message}\nThe whole output: {log_file}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of Ray's that were interrupted abort the interpreter's own exit (SIGABRT)
    if config.trainer.val_only:
        print(validation.table(max((run_dir / VALIDATION).glob("step_*.json"), key=os.path.getmtime)))
        return
    print(console.summary(run_dir))
    draw(run_dir)


def end_on(number: signal.Signals) -> None:
    """Have a signal end the run as Ctrl-C does."""
    signal.signal(number, lambda *_: sys.exit(number))  # the enumeration's member, which names it later


def ignore_interruptions() -> None:
    """From now on none ends the run, nor does the last one any more.

    Ray's handler of SIGTERM (Abseil's) sets an alarm that aborts the process three seconds later without a word.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.alarm(0)


def run_and_clean_up(config, run_dir: Path, out) -> tuple[str | None, int]:
    """Run, and take down what was started. Returns what went wrong, if anything, and the exit code."""
    watchdog = Watchdog(run_dir, **config.watchdog)
    scratch = processes.make_scratch()
    message, code = "the run ended without a word", 1
    try:
        message = run(config, run_dir, out, watchdog, scratch)
    except (KeyboardInterrupt, SystemExit) as stop:
        if watchdog.reason is not None:  # the signal is the watchdog's own
            message = failure(config, watchdog.reason)
        else:
            number = getattr(stop, "code", signal.SIGINT)  # a KeyboardInterrupt has none
            if not isinstance(number, signal.Signals):
                number = signal.SIGTERM  # for which Ray, once it is up, has a handler of its own
            message, code = f"interrupted by {number.name}. {where_to_go_on(config)}", 128 + number
    finally:
        ignore_interruptions()  # what follows takes seconds and must be complete
        if watchdog.is_alive():
            watchdog.join(5)  # in the middle of a look
        leftovers, children = set(watchdog.shared_memory), processes.descendants()
        with suppress(Exception):  # Ray may be half up, or half gone
            leftovers |= processes.leftovers()
            if joins_a_cluster(config):
                processes.remove_leftovers_elsewhere()
        ray.shutdown()
        processes.kill_children(scratch, children)
        processes.remove(leftovers)
        processes.remove_scratch(scratch, run_dir / RAY_LOGS if message is not None else None)
    return message, code


def failure(config, *reasons: str | None) -> str:
    """Why training failed, and how to go on."""
    with suppress(OSError):
        sys.stdout.flush()
    first = console.first_error((Path(config.run_dir) / LOG).read_text(errors="replace"))
    reasons = (*reasons, f"the first error in the log is {first}" if first else None)
    return f"Training failed: {'; '.join(filter(None, reasons))}. {where_to_go_on(config)}"


def where_to_go_on(config) -> str:
    """The last checkpoint, and how to go on from it."""
    try:
        folder = latest_checkpoint(Path(config.trainer.default_local_dir))
    except ValueError:
        folder = None
    if folder is None:
        return "No checkpoint was saved."
    return f"The last checkpoint is {folder}: the same OUTPUT_DIR with trainer.resume_mode=auto goes on from it."


def draw(run_dir: Path) -> None:
    """The run's picture; a run that trained well does not fail for want of one."""
    try:
        from recipe.bapo import plot

        plot.draw({run_dir.name: [run_dir]}, run_dir / PICTURE)
        print(f"Picture: {run_dir / PICTURE}")
    except (ImportError, ValueError, OSError) as error:
        print(f"No picture: {error}")


def run(config, run_dir: Path, out, watchdog: Watchdog, scratch: Path) -> str | None:
    """Check the config, then run verl's trainer; what a person should see goes to ``out``. Returns what went wrong."""
    from recipe.bapo.trainer import TaskRunnerOnThisNode

    config.run_dir = str(run_dir)  # absolute, and before it is resolved: workers may run in another folder
    try:
        OmegaConf.resolve(config)
        lines = table.run(config)
    except Exception as error:
        traceback.print_exc()
        return str(error) or type(error).__name__
    print(table.table(lines))
    for line in lines:
        if line.status == "warning":
            print(f"Warning: {line.detail}", file=out)
    failed = [line.detail for line in lines if line.status == "failed"]
    if failed:
        return "\nError: ".join(failed)
    claim = claim_machine()  # held until this process ends
    if claim is None and not joins_a_cluster(config):
        return "another run was started on this machine at the same moment: wait for its end."
    OmegaConf.save(config, run_dir / CONFIG)
    choose_cluster(config, scratch)
    print(f"Starting Ray, the trainer and the vLLM servers: a minute or two. Log: {run_dir / LOG}", file=out)
    out.flush()
    printer = live.StepPrinter(run_dir, config.trainer.total_training_steps, out, since=time.time())
    printer.start()
    watchdog.start()
    try:
        run_ppo(config, TaskRunnerOnThisNode())
    except Exception as error:
        with suppress(OSError):  # the disk is full
            traceback.print_exc()
        return failure(config, watchdog.last_look(), full_disk(config), reason_of(error))
    finally:
        ignore_interruptions()
        watchdog.done.set()
        printer.done.set()
        printer.join()
    return None


def choose_cluster(config, scratch: Path) -> None:
    """Have Ray join the cluster that there is, or start one of its own in ``scratch``.

    A job submitted to a cluster finds ``RAY_ADDRESS`` in its environment; several nodes need one that is up.
    """
    ray_init = config.ray_kwargs.ray_init
    with open_dict(config):
        if joins_a_cluster(config):
            ray_init.address = "auto"
            ray_init.num_cpus = ray_init.num_gpus = None  # of the cluster's nodes; Ray refuses them here
        else:
            ray_init.address = "local"
            ray_init._temp_dir = str(scratch / "ray")
            # Ray remembers the last 100,000 tasks otherwise: at a megabyte a step its server would grow for hours.
            ray_init._system_config = {"task_events_max_num_task_in_gcs": 10_000}


def full_disk(config) -> str | None:
    """Says so if there is hardly any space left for checkpoints; torch's own error would not."""
    folder = Path(config.trainer.default_local_dir)
    if not folder.exists() or (free := shutil.disk_usage(folder).free) >= 64 << 20:
        return None
    return f"no space left: {folder} has {free / (1 << 20):.1f} MiB free"


def reason_of(error: Exception) -> str:
    """What went wrong first, without Ray's layers of tracebacks."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0].rstrip('.') if str(cause).strip() else ''}"


if __name__ == "__main__":
    main()
