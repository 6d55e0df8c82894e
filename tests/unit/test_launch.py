# SPDX-License-Identifier: Apache-2.0
"""The parent of a run, with small programs in place of training: its messages, its exit codes, what it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf
from support.commands import LIMIT, ROOT, until
from support.configs import composed

from recipe.bapo import main_bapo
from recipe.bapo.host import cleanup
from recipe.bapo.run import task_runner, train

LAUNCH = """
import os, sys, time
from pathlib import Path
from recipe.bapo.host import cleanup
from recipe.bapo.run import __main__ as launch
folder = Path(os.environ["OUTPUT_DIR"])
launch.TRAINING = (sys.executable, "-u", "-c", sys.argv[1])
launch.PATIENCE, cleanup.kill_descendants.__defaults__ = {limit}, ({limit},)  # a busy machine may need it
cleanup.SHARED_MEMORY = Path({shared_memory!r})  # not that of other runs on this machine
def handle_message(self, kind, content, handle=launch.TrainingProcess.handle_message):
    try:
        handle(self, kind, content)
    finally:
        (folder / f"heard-{{kind}}").touch()
launch.TrainingProcess.handle_message = handle_message
{before}
sys.exit(launch.main([]))
"""
TRAINING = """
import json, os, subprocess, sys, time
from pathlib import Path
from recipe.bapo.run.messages import send, wait_for_final_check
folder = Path(os.environ["OUTPUT_DIR"])
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.05)
def hang():
    while True:
        time.sleep(1)
def train(cluster=False, **limits):
    print("ERROR in no worker")
    watchdog = {"max_silence_s": 1e9, "max_sync_s": 60, "max_exit_s": 2, "grace_s": 0.5, **limits}
    trainer = {"total_training_steps": 2, "val_only": False, "default_local_dir": str(folder / "checkpoints")}
    config = folder / "config.yaml"
    config.write_text(json.dumps({"watchdog": watchdog, "trainer": trainer}))
    send("checked", cluster)
    send("info", "it trains")
"""


def hear_sighup():
    """Reset SIGHUP, which is ignored if nohup started the tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Launched:
    """A launcher in its own session, whose training is the program ``code``.

    When it has handled a message of a kind, it makes the file ``heard-<kind>`` in the run's folder.
    """

    def __init__(self, folder, code, before="", preexec_fn=None, **environment):
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.shared_memory = folder / "shared_memory"
        self.shared_memory.mkdir()
        launcher = LAUNCH.format(before=before, limit=LIMIT, shared_memory=str(self.shared_memory))
        folders = {"OUTPUT_DIR": str(folder / "run"), "TMPDIR": str(folder), "RAY_TMPDIR": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", launcher, f"{TRAINING}\nmark = {self.mark!r}\n{code}"],
            cwd=ROOT,
            env=os.environ | folders | {"PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=preexec_fn or hear_sighup,
        )

    def wait_for(self, name):
        """Wait until a file is in the run's folder."""

        def made():
            assert self.process.poll() is None, self.process.communicate()
            return (self.folder / "run" / name).exists()

        until(made, LIMIT, name)

    def end(self):
        """Return exit code, standard output and standard error, and check that no process with its mark is left."""
        out, err = self.process.communicate(timeout=LIMIT)
        assert not self.left(), self.left()
        assert not list(self.folder.glob("bapo-*"))
        return self.process.returncode, out, err

    def left(self):
        """List the processes with its mark among their arguments."""
        processes = psutil.process_iter(["cmdline"])
        return [process for process in processes if self.mark in " ".join(process.info["cmdline"] or ())]


@pytest.fixture
def launch():
    """Start launchers, and kill the remaining processes at the end."""
    started = []
    with tempfile.TemporaryDirectory(prefix="launch", dir="/tmp") as parent:

        def start(*arguments, **options):
            folder = Path(parent, str(len(started)))
            folder.mkdir()
            started.append(Launched(folder, *arguments, **options))
            return started[-1]

        yield start
        for one in started:
            one.process.kill()
            for process in one.left():
                process.kill()
            one.process.wait(LIMIT)


def test_what_is_wrong_with_the_config_is_on_the_console(launch):
    sends = "send('info', 'Warning: odd')\nsend('error', 'a is bad')\nsend('error', 'b too')"
    code, out, err = launch(f"{sends}\nsys.exit(1)").end()
    assert code == 1 and out == "Warning: odd\n"
    assert err.startswith("Error: a is bad\nError: b too\nThe whole output: ") and err.endswith("/run/train.log\n")


def test_where_nobody_said_what_is_wrong_the_end_of_the_log_does(launch):
    code, _, err = launch("print('first\\n' * 9 + 'Key x is not in struct')\nsys.exit(1)").end()
    assert code == 1 and err.startswith("Error: first\n") and "Key x is not in struct" in err
    assert len(err.splitlines()) <= 8


def test_what_hydra_prints_in_place_of_a_run_is_shown(launch):
    code, out, err = launch("print('trainer: {}')").end()
    assert (code, out.strip(), err) == (0, "trainer: {}", "")


def test_a_library_that_asks_a_question_ends_the_run(launch):
    """The system stops a process in another process group when it reads from the terminal."""
    run = launch("input('Run the custom code of this model? ')")
    assert run.process.wait(LIMIT) == 1 and "EOFError" in run.process.stderr.read()


@pytest.mark.parametrize(
    "variable, folder, said",
    [
        ("OUTPUT_DIR", "/dev/null/run", "invalid run_dir (OUTPUT_DIR)=/dev/null/run: "),
        ("RAY_TMPDIR", "/dev/null/folder", "no temporary folder can be made (RAY_TMPDIR or TMPDIR): "),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_in_a_line(launch, variable, folder, said):
    code, _, err = launch("", **{variable: folder}).end()
    assert code == 1 and err.startswith(f"Error: {said}") and err.count("\n") == 1


def test_a_second_start_in_a_folder_changes_nothing_of_the_first(launch):
    first = launch("train()\nwait_for('go')\nsend('trained')")
    first.wait_for("heard-info")
    folder = first.folder / "run"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, _, err = launch("train()", OUTPUT_DIR=str(folder)).end()
    assert code == 1 and err.startswith(f"Error: invalid run_dir (OUTPUT_DIR)={folder}: another run has this folder: ")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "go").touch()
    assert first.end()[0] == 0
    later = launch("train()\nsend('trained')", OUTPUT_DIR=str(folder))  # the claim ends with its process
    assert later.end()[0] == 0 and (folder / "train.1.log").exists()


def test_a_fault_in_the_display_changes_neither_run_nor_exit_code(launch):
    """A line that is not verl's fails in the display of steps and in the summary."""
    write = "(folder / 'metrics.jsonl').write_text('garbage\\n')"
    code, out, err = launch(f"train(max_exit_s=1e9)\n{write}\nsend('info', 'written')\nsend('trained')").end()
    assert code == 0 and out.count("Warning: a part of the display failed (") == 1 and "The run goes on." in out
    assert "Traceback" not in err


def test_a_process_that_hangs_after_training_is_killed_and_the_run_has_ended_well(launch):
    code, out, err = launch("train()\nsend('trained')\nhang()").end()
    assert code == 0 and not err
    assert "Training is done, but its process did not end within 2 s (watchdog.max_exit_s) and is killed." in out


def test_a_process_that_crashes_after_training_has_ended_well(launch):
    code, out, err = launch("train(max_exit_s=1e9)\nsend('trained')\nos._exit(139)").end()
    assert code == 0 and not err and "Training is done, but its process ended with code 139." in out


def test_a_run_that_ends_well_shows_its_steps_and_a_summary(launch):
    data = {"training/global_step": 1, "critic/rewards/mean": 0.5, "training/responses_arrived": 0.75}
    write = f"(folder / 'metrics.jsonl').write_text({json.dumps({'step': 1, 'data': data}) + chr(10)!r})"
    write += "\nprint('BAPO: all is well')"
    run = launch(f"train()\n{write}")
    code, out, err = run.end()
    assert code == 0 and not err, err
    log = f"{run.folder}/run/train.log"
    assert out.startswith(f"Starting Ray, the trainer and the vLLM servers; this takes 1 to 4 minutes. Log: {log}\n")
    assert "\nit trains\n" in out and "\nstep 1/2  reward 0.500" in out and "Warning: in step 1 75%" in out
    assert "\nBAPO: all is well\n" in out and "1 steps, mean of" in out and Path(log).exists()
    assert f"\nPicture: {run.folder}/run/dynamics.png\n" in out


@pytest.fixture
def sent(monkeypatch):
    """Return what training has sent to its parent, by kind; it makes no checks, and does not train."""
    sent = {}
    monkeypatch.setattr(train, "send", lambda kind, content: sent.update({kind: content}))
    for name in ("check", "claim_machine", "call_verl"):
        monkeypatch.setattr(train, name, lambda *_: None)
    return sent


def test_training_tells_the_parent_when_its_config_is_there(task, tmp_path, sent):
    (tmp_path / "metrics.jsonl").write_text("of an earlier start")
    main_bapo.main.__wrapped__(composed(task, f"run_dir={tmp_path}"))
    assert sent["checked"] is False and (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "metrics.jsonl").exists()  # otherwise the console would show it


@pytest.mark.parametrize("cluster", [False, True])
def test_a_machine_that_another_run_has_ends_a_run_with_its_own_ray(task, tmp_path, sent, monkeypatch, cluster):
    def refuse():
        raise ValueError("another run is on this machine")

    monkeypatch.setattr(train, "claim_machine", refuse)
    config = composed(task, f"run_dir={tmp_path}", f"trainer.nnodes={2 if cluster else 1}")
    with nullcontext() if cluster else pytest.raises(SystemExit):
        train.main(config)
    assert sent == ({"checked": True} if cluster else {"error": "another run is on this machine"})


@pytest.mark.parametrize("address, claimed", [("local", []), ("auto", ["claimed"])])
def test_the_task_runner_logs_to_the_folder_and_cleans_up_whatever_happens(monkeypatch, address, claimed):
    happened, runner = [], task_runner.TaskRunner.__ray_metadata__.modified_class()
    config = OmegaConf.create({"run_dir": "/the/run", "ray_kwargs": {"ray_init": {"address": address}}})

    def fail(config):
        happened.append(os.environ["VERL_FILE_LOGGER_PATH"])
        raise RuntimeError("it failed")

    monkeypatch.setattr(task_runner.os, "environ", dict(os.environ))
    monkeypatch.setattr(task_runner, "claim_cluster", lambda: happened.append("claimed"))
    monkeypatch.setattr(task_runner, "remove_on_every_node", lambda: happened.append("cleaned up"))
    monkeypatch.setattr(task_runner.bapo_run, "run_trainer", fail)
    with pytest.raises(RuntimeError, match="it failed"):
        runner.run(config)
    assert happened == [*claimed, "/the/run/metrics.jsonl", "cleaned up"]


def test_a_yaml_file_that_names_another_folder_than_the_logs_is_refused(task, tmp_path, sent, monkeypatch):
    monkeypatch.setattr(train, "has_parent", lambda: True)
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "log"))
    with pytest.raises(SystemExit):
        train.main(composed(task, f"run_dir={tmp_path}/other"))
    assert sent["error"].startswith(f"invalid run_dir={tmp_path}/other of a yaml file, because the log is in")
    assert not (tmp_path / "other").exists()


def test_a_failure_is_named_with_what_the_log_says_and_the_way_on(launch):
    log = """(WorkerDict pid=7) RuntimeError: no room
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 1f
"""
    run = launch(f"train()\nprint({log!r})\nsend('error', 'RayTaskError: failed')\nhang()")
    checkpoints = run.folder / "run" / "checkpoints"
    (checkpoints / "global_step_4").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    code, _, err = run.end()
    assert code == 1 and f"{checkpoints}/global_step_4" in err
    for reason in ("worker WorkerDict has died", "RayTaskError: failed", "RuntimeError: no room (WorkerDict)"):
        assert reason in err


def test_a_training_process_that_is_killed_before_its_checks_is_named(launch):
    code, _, err = launch("os.kill(os.getpid(), 9)").end()
    assert code == 1 and err.startswith("Error: the training process ended with code -9\n")


def test_a_training_process_that_is_killed_is_named(launch):
    code, _, err = launch("train()\nos.kill(os.getpid(), 9)").end()
    assert code == 1 and "Training failed: the training process ended with code -9. No checkpoint was saved" in err


def test_the_watchdogs_reason_ends_the_run_and_stacks_are_written(launch):
    before = """
from recipe.bapo.run import watchdog
watchdog.INTERVAL, watchdog.Watchdog.silence = 0.2, lambda self: "it hangs"
"""
    run = launch("train()\nhang()", before=before)
    code, _, err = run.end()
    assert code == 1 and "Error: Training failed: it hangs. No checkpoint was saved." in err
    assert (run.folder / "run" / "stacks.txt").exists()


def test_a_failure_is_explained_while_training_still_lives(launch):
    """The watchdog checks which of vLLM's processes has died; all of them end with the training process."""
    before = """
from recipe.bapo.run.watchdog import Watchdog
def dead_server(self):
    while not (folder / "waits").exists() and any(cleanup.descendants().values()):
        time.sleep(0.05)
    lives = any(cleanup.descendants().values())
    return "an engine has died" if lives else "all are gone"
Watchdog.should_end, Watchdog.dead_server = lambda self: False, dead_server
"""
    code = """
from types import SimpleNamespace
from recipe.bapo.run import messages
def sleep(seconds):
    (folder / "waits").touch()
    hang()
messages.time = SimpleNamespace(sleep=sleep)  # does not end of itself, however slow the launcher is
train()
send('error', 'of Ray')
wait_for_final_check()
os._exit(1)
"""
    code, _, err = launch(code, before=before).end()
    assert code == 1 and "Error: Training failed: an engine has died; of Ray. No checkpoint was saved." in err


def test_a_terminal_that_hangs_up_changes_neither_clean_up_nor_exit_code(launch):
    code = """
train()
wait_for('closed')
send('info', 'nobody reads this')
hang()
"""
    run = launch(code)
    run.wait_for("heard-info")  # that it trains
    run.process.stdout.close()
    run.process.stderr.close()
    (run.folder / "run" / "heard-info").unlink()
    (run.folder / "run" / "closed").touch()
    run.wait_for("heard-info")
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(LIMIT) == 129 and not run.left()


def test_an_interruption_after_training_is_no_failure(launch):
    run = launch("train(max_exit_s=1e9)\nsend('trained')\nhang()")
    run.wait_for("heard-trained")
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 0 and not err and "Training is done, but its process is killed after SIGTERM." in out


def test_another_interruption_does_not_break_the_clean_up(launch):
    before = """
def kill_descendants(end=cleanup.kill_descendants):
    (folder / "cleans").touch()
    while not (folder / "interrupted").exists():
        time.sleep(0.05)
    end()
cleanup.kill_descendants = kill_descendants
"""
    run = launch("(folder / 'up').touch()\nhang()", before=before)
    run.wait_for("up")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("cleans")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        run.process.send_signal(number)
    (run.folder / "run" / "interrupted").touch()  # the signals have been delivered before it sees this file
    code, _, err = run.end()
    assert code == 143 and "Error: interrupted by SIGTERM." in err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGHUP, 1)])
def test_where_signals_are_ignored_sigint_ends_a_run_and_nohup_keeps_its_meaning(launch, number, code):
    """A shell without job control starts background processes with SIGINT ignored."""
    training = """
(folder / 'up').touch()
wait_for('go')
send('error', 'of its own')
sys.exit(1)
"""
    run = launch(training, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    run.wait_for("up")
    run.process.send_signal(number)
    if number == signal.SIGHUP:  # a run that does not ignore it has got it by now, and would say so
        (run.folder / "run" / "go").touch()
    found, _, err = run.end()
    assert found == code and ("of its own" in err) == (code == 1)


def test_processes_that_hide_are_ended_and_shared_memory_of_the_killed_is_removed(launch):
    code = """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
sleeper = f"import time; time.sleep(60)  # {mark}"
forking = (
    f"import subprocess, sys, time  # {mark}\\n"
    f"while True: time.sleep(0.05); subprocess.Popen([sys.executable, '-c', {sleeper!r}])"
)
for program in (sleeper, forking):
    subprocess.run(["setsid", "--fork", "env", "-i", sys.executable, "-c", program])
(folder / "made").write_text(block.name)
(folder / 'up').touch()
hang()
"""
    run = launch(code)
    run.wait_for("up")
    block = Path("/dev/shm", (run.folder / "run" / "made").read_text())
    until(lambda: len(run.left()) > 4, LIMIT, "processes that hide")  # launcher and training are two of them
    assert block.exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143 and not block.exists()


def test_weights_that_a_killed_worker_left_in_shared_memory_are_removed(launch):
    code = """
train()
(folder.parent / "shared_memory" / "verl_weights_ours").touch()
hang()
"""
    run = launch(code)
    run.wait_for("heard-info")
    (made,) = until(lambda: list(run.shared_memory.iterdir()), LIMIT, "the weights")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143 and not made.exists()


def test_training_ends_with_a_launcher_that_is_killed(launch):
    run = launch("(folder / 'up').touch()\nhang()")
    run.wait_for("up")
    assert run.left()
    run.process.kill()
    until(lambda: not run.left(), LIMIT, "the end of training")


def test_on_a_cluster_training_has_time_to_end_of_itself(launch):
    """Training removes its files on other nodes. A terminal sends Ctrl-C to the whole group; training gets it once."""
    before = """
import subprocess
def wait(self, timeout=None, wait=subprocess.Popen.wait):
    (folder / "launcher_waits").touch()
    return wait(self, timeout)
subprocess.Popen.wait = wait
"""
    code = """
train(cluster=True)
try:
    (folder / 'up').touch()
    hang()
except KeyboardInterrupt:
    wait_for("launcher_waits")  # a second Ctrl-C would end this
    (folder / 'clean').touch()
"""
    run = launch(code, before=before)
    run.wait_for("heard-checked")
    run.wait_for("up")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end()[0] == 130 and (run.folder / "run" / "clean").exists()


def test_the_wait_for_what_cannot_be_killed_has_an_end(monkeypatch):
    monkeypatch.setattr(cleanup, "descendants", dict)
    monkeypatch.setattr(cleanup.os, "waitpid", lambda *_: (0, 0))
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(cleanup, "time", clock)
    cleanup.kill_descendants(timeout=0.5)
    assert 0.5 <= sum(slept) < 0.6


def test_an_empty_output_folder_is_a_new_one(launch, tmp_path):
    before = f"import os; os.chdir({str(tmp_path)!r})"
    (tmp_path / "train.log").write_text("of the user")
    code, out, _ = launch("print('trainer: {}')", before=before, OUTPUT_DIR="").end()
    assert code == 0 and (tmp_path / "train.log").read_text() == "of the user"
    assert len(list(tmp_path.glob("runs/bapo-*/train.log"))) == 1


@pytest.mark.parametrize("code, kept", [(0, False), (1, True)])
def test_rays_logs_of_a_failure_are_kept(launch, code, kept):
    make_logs = """
logs = Path(os.environ["RAY_TMPDIR"], "ray", "session_latest", "logs")  # Ray prefers it to TMPDIR
(logs / "old").mkdir(parents=True)  # with mode 0777, as Ray makes them
(logs / "gcs_server.out").write_text("a log")
"""
    with tempfile.TemporaryDirectory(prefix="launch", dir="/tmp") as other:
        program = f"train()\n{make_logs}\nsys.exit({code})"
        run = launch(program, preexec_fn=lambda: os.umask(0), RAY_TMPDIR=other)
        assert run.end()[0] == code
        assert os.listdir(other) == []  # the run's own folder in it is removed
    copy = run.folder / "run" / "ray_logs"
    assert (copy / "gcs_server.out").exists() == kept
    if kept:
        modes = {path.name: path.stat().st_mode & 0o777 for path in (copy, *copy.iterdir())}
        assert modes == {"ray_logs": 0o755, "old": 0o755, "gcs_server.out": 0o644}
