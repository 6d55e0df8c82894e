# SPDX-License-Identifier: Apache-2.0
"""Start runs of the real stack in tests, and find what they leave behind."""

import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
from support.ports import free_ports as free_ports
from support.records import read_updates

from recipe.bapo.host.cleanup import remove

ROOT = Path(__file__).parents[2]
SECRET = "a-planted-secret"
MARKER = "BAPO_TEST_RUN"  # an environment variable
NAMES = ("bapo", "ray", "rl-", "verl", "vllm", "torch", "ckpt")
IN_SHARED_MEMORY = ("psm_", "verl_weights_", "torch_", "sem.")  # prefixes of a run's shared memory
SCRIPT = ("bash", "recipe/bapo/run_bapo_example.sh")
SHORT_STEPS = "size=cpu"  # 8 updates a step; the example has 24


def environment_of(output, **environment):
    """Return the environment of a run on the CPU path with its output in ``output``."""
    return {**os.environ, "VERL_PLATFORM": "cpu", "OUTPUT_DIR": str(output), **environment}


def run_example(output, *overrides, timeout=1800, **environment):
    """Run the run script with its output in ``output``."""
    return subprocess.run(
        [*SCRIPT, *overrides],
        cwd=ROOT,
        env=environment_of(output, **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def log_of(output, lines=40):
    """Return the end of a run's log."""
    log = output / "train.log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "no log"


def explain(run, output):
    """Return what helps to understand why a run failed."""
    return f"{run.stdout}\n{run.stderr}\n{log_of(output)}"


def updates_of(output):
    """Return the updates in the record of a run that was started once."""
    return [update for path in output.glob("record-*.jsonl") for update in read_updates(path)]


def temporary_files():
    """List what is in shared memory, in /tmp/ray and in folders for temporary files.

    In a folder named ``tmp`` only sockets count, and files whose names begin with one of ``NAMES``.
    """
    folders = (Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir()), Path("/tmp/ray"))
    paths = {path for folder in folders if folder.exists() for path in folder.iterdir()}
    return {path for path in paths if path.parent.name != "tmp" or path.name.startswith(NAMES) or path.is_socket()}


def in_use():
    """List the paths that living processes have open, mapped into memory or bound to a socket."""
    paths = {connection.laddr for connection in psutil.net_connections("unix")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # raised if it has ended
            paths.update(line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    paths.add(os.readlink(descriptor))
    return paths


def left_since(before):
    """List temporary files that are not in ``before`` and that no process uses. Those in use may be of other work."""
    new = temporary_files() - before
    used = in_use() if new else ()
    return {path for path in new if not any(name == str(path) or name.startswith(f"{path}/") for name in used)}


@contextmanager
def removing_what_others_leave():
    """Remove the files of a run that our launcher does not clean up, such as one of verl's own entry point.

    The run needs its own folder for temporary files: give it the context's value as environment.
    """
    before = temporary_files()
    # A short path: Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="bapo", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            yield {"TMPDIR": folder, "RAY_TMPDIR": folder}
        finally:
            remove(
                path
                for path in left_since(before)
                if path.parent.name == "tmp" or path.name.startswith(IN_SHARED_MEMORY)
            )


def reset_signals():
    """Reset these signals in a child, because nohup or a background shell that starts the tests may ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Started:
    """A run in the background, to which a test can do something."""

    def __init__(self, output, *overrides, inside=(), console=None, **environment):
        """Start the run.

        Args:
            output: the run's output folder.
            overrides: arguments of the run script.
            inside: a command that runs the run's command, such as one that removes the network.
            console: the file for what the run prints; by default ``NAME.console`` beside ``output``.
            environment: variables added to this process's.
        """
        self.output = output
        self.marker = uuid.uuid4().hex  # every process of the run inherits it
        self.console = console or output.parent / f"{output.name}.console"
        self.console.parent.mkdir(parents=True, exist_ok=True)
        self.before = temporary_files()
        secrets = {"WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET}
        with open(self.console, "w") as printed:
            self.process = subprocess.Popen(
                [*inside, *SCRIPT, SHORT_STEPS, *overrides],
                cwd=ROOT,
                env=environment_of(output, **secrets, **environment, **{MARKER: self.marker}),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=reset_signals,
            )

    def text(self):
        """Return the run's output so far."""
        return self.console.read_text()

    def wait_for(self, happened, what, timeout=300, interval=0.2):
        """Wait until ``happened()`` is true, and return its value. Fail if the run ends before."""
        until = time.monotonic() + timeout
        while not (found := happened()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}\n{log_of(self.output)}"
            assert time.monotonic() < until, f"no {what} in {timeout} s:\n{self.text()}\n{log_of(self.output)}"
            time.sleep(interval)
        return found

    def wait_for_step(self, step, timeout=600):
        """Wait until the line of a step is printed."""
        self.wait_for(lambda: re.search(rf"^step +{step}/", self.text(), re.M), f"step {step}", timeout)

    def processes(self):
        """Return the command line of each living process of the run, by process id."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):  # it has ended
                # A process may leave the session, or overwrite its environment with a title.
                if os.getsid(process.pid) == self.process.pid or process.environ().get(MARKER) == self.marker:
                    found[process.pid] = " ".join(process.cmdline()).strip()
        return {pid: command for pid, command in found.items() if command}

    def find(self, name):
        """Return the ids of the run's processes whose command line contains ``name``."""
        return [pid for pid, command in self.processes().items() if name in command]

    def reachable(self):
        """Return the commands of the run's processes that listen beyond the loopback interface, by address and port."""
        found = {}
        for pid, command in self.processes().items():
            with suppress(psutil.NoSuchProcess):
                for connection in psutil.Process(pid).net_connections("inet"):
                    address = ip_address(connection.laddr.ip)
                    address = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1
                    if connection.status == psutil.CONN_LISTEN and not address.is_loopback:
                        found[f"{connection.laddr.ip}:{connection.laddr.port}"] = command
        return found

    def end(self, timeout):
        """Wait for the run to end, then up to 2 s for its processes. Returns its exit code and the seconds it took."""
        began = time.monotonic()
        code = self.process.wait(timeout)
        took = time.monotonic() - began
        while self.processes() and time.monotonic() < began + took + 2:
            time.sleep(0.2)
        return code, took

    def left(self):
        """List what the run should not leave: processes, files outside its folder, and files in it with the secret."""
        outside = sorted(map(str, left_since(self.before)))
        inside = [self.console, *(path for path in self.output.rglob("*") if path.is_file())]
        secrets = [str(path) for path in inside if SECRET.encode() in path.read_bytes()]
        return [*self.processes().items(), *outside, *secrets]

    def clean_up(self):
        """Kill the remaining processes."""
        for _ in range(3):
            for pid in self.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.2)
        self.process.wait(10)
