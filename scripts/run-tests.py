#!/usr/bin/env python3
"""Runs the tests of the workspace, each in a process of its own, and decides on red or green.

  scripts/run-tests.py [OPTION…]
    --quick         only the unit tests, the scenarios of the token buckets on each store, and the
                    check of the modules' dependencies
    --ignored       only the ignored tests that scripts/full.sh runs
    --clock         only the tests of scripts/clock-tests.txt
    --alone         each test runs alone, and judges its figures
    --no-rerun      a failed test is red at once
    --repeat N      runs of each test (1)
    --jobs N        tests that run at a time (RUST_TEST_THREADS of .cargo/config.toml)
    --slowest N     length of the list of the slowest tests (20)
    --timeout S     seconds after which a test counts as hung (600)
    --only TEXT     only tests whose name contains TEXT
    --except TEXT   no tests whose name contains TEXT

A test is named as `PACKAGE BINARY PATH`, for example `tollgate-server allow memory::it_is_bounded`.

Tests whose verdict is a duration, a rate, or a share of the CPU are listed in
scripts/clock-tests.txt. They run last, one after the other, with TOLLGATE_ALONE=1, which tells a
test to judge its figures. The others run several at a time.

A failed test runs again twice, alone, after all others. If it passes both times, it is flaky: the
exit code is 0, the last lines of the output name the test, and target/flaky has the output of the
failure. Otherwise the exit code is 1. A test that hangs does not run again, and neither do the other
failed tests once three have failed again.
"""
import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLOCK_TESTS = os.path.join(ROOT, "scripts", "clock-tests.txt")
TARGET = os.path.join(ROOT, os.environ.get("CARGO_TARGET_DIR", "target"))

# Once so many tests have failed again, something is broken, and further runs would only take time.
ENOUGH_RED = 3

# The tests that --quick runs besides the unit tests.
QUICK = (re.compile(r"tollgate-server allow scenarios::on_\w+$"), re.compile(r"tollgate-server layers "))


@dataclasses.dataclass(eq=False)
class Binary:
    package: str
    name: str
    path: str
    folder: str
    environment: dict
    is_unit: bool


Test = collections.namedtuple("Test", "binary path")
# `verdict` is "ok", "FAILED" or "HUNG".
Result = collections.namedtuple("Result", "test verdict seconds cpu output")


def full_name(test):
    return f"{test.binary.package} {test.binary.name} {test.path}"


def stop(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


# --- what there is to run ------------------------------------------------------------


def record(path, command):
    """Records how cargo starts a test binary: see `binaries`."""
    entry = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def binaries():
    """Builds the tests. Cargo is told to start each binary by this script, which notes the folder
    and the environment: so both are what `cargo test` gives to tests."""
    with tempfile.TemporaryDirectory() as scratch:
        notes = os.path.join(scratch, "notes")
        runner = json.dumps([sys.executable, os.path.abspath(__file__), "--record", notes])
        # The builds of scripts/test.sh, as scripts/lib-build.sh sets them.
        wrapper = os.path.join(ROOT, "scripts", "rustc-with-lints.sh")
        os.environ.setdefault("RUSTC_WORKSPACE_WRAPPER", wrapper)
        os.environ.setdefault("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__")
        built = subprocess.run(
            ["cargo", "test", "--workspace", "--locked", "--lib", "--bins", "--tests"]
            + ["--quiet", "--config", f"target.'cfg(all())'.runner={runner}"],
            cwd=ROOT, check=False)
        if built.returncode != 0:
            stop("the tests do not build")
        with open(notes, encoding="utf-8") as file:
            entries = [json.loads(line) for line in file]
    return [binary_of(entry) for entry in entries]


def binary_of(entry):
    path, folder, environment = entry["command"][0], entry["folder"], entry["environment"]
    # The file is called target/debug/deps/NAME-HASH.
    name = os.path.basename(path).rsplit("-", 1)[0]
    in_tests = os.path.join(folder, "tests", name)
    is_unit = not (os.path.exists(in_tests) or os.path.exists(in_tests + ".rs"))
    return Binary(environment["CARGO_PKG_NAME"], name, path, folder, environment, is_unit)


def tests_of(binary, *options):
    listed = subprocess.run(
        [binary.path, "--list", "--format", "terse", *options],
        cwd=binary.folder, env=binary.environment, check=True, stdout=subprocess.PIPE, text=True)
    lines = listed.stdout.splitlines()
    return [Test(binary, line[: -len(": test")]) for line in lines if line.endswith(": test")]


def clock_names():
    with open(CLOCK_TESTS, encoding="utf-8") as file:
        lines = [line.split("#")[0].strip() for line in file]
    return {line for line in lines if line}


# --- runs of tests -------------------------------------------------------------------


class Runner:
    def __init__(self, timeout):
        self.timeout = timeout
        self.lock = threading.Lock()
        self.running = {}
        self.is_stopping = False

    def run(self, test, alone=False):
        """Runs a test in a process group of its own, so that whatever it has started can be
        stopped with it."""
        environment = dict(test.binary.environment, **({"TOLLGATE_ALONE": "1"} if alone else {}))
        started = time.monotonic()
        with tempfile.TemporaryFile() as output:
            with self.lock:
                if self.is_stopping:
                    return Result(test, "FAILED", 0.0, 0.0, "interrupted")
                process = subprocess.Popen(
                    [test.binary.path, "--exact", test.path, "--include-ignored"],
                    cwd=test.binary.folder, env=environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
                self.running[process.pid] = test
            status, usage, hung = self.wait(process.pid, started)
            process.returncode = status
            seconds = time.monotonic() - started
            output.seek(0)
            text = output.read().decode(errors="replace")
        cpu = usage.ru_utime + usage.ru_stime
        # Nothing that a test has started may load the machine under the others.
        self.kill(process.pid)
        if hung:
            text += f"\nThe test was stopped: it had not ended after {self.timeout} seconds.\n"
            return Result(test, "HUNG", seconds, cpu, text)
        passed = status == 0 and "test result: ok. 1 passed" in text
        if not passed:
            text += f"\nExit status: {os.waitstatus_to_exitcode(status)}\n"
        return Result(test, "ok" if passed else "FAILED", seconds, cpu, text)

    def wait(self, pid, started):
        hung = False
        waker = threading.Timer(self.timeout, self.kill, (pid,))
        waker.start()
        _, status, usage = os.wait4(pid, 0)
        waker.cancel()
        with self.lock:
            del self.running[pid]
        hung = os.WIFSIGNALED(status) and time.monotonic() - started >= self.timeout
        return status, usage, hung

    @staticmethod
    def kill(pid):
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def stop_all(self):
        with self.lock:
            self.is_stopping = True
            for pid in self.running:
                self.kill(pid)

    def several(self, tests, jobs, done, alone=False):
        """Runs tests, `jobs` at a time, and calls `done` with each result. With `alone`, a test
        may judge its figures."""
        pool = concurrent.futures.ThreadPoolExecutor(jobs)
        try:
            futures = [pool.submit(self.run, test, alone) for test in tests]
            for future in concurrent.futures.as_completed(futures):
                done(future.result())
        except BaseException:
            self.stop_all()
            raise
        finally:
            pool.shutdown()


# --- order ---------------------------------------------------------------------------


class Times:
    """How long each test took last, so that the longest begin first."""

    PATH = os.path.join(TARGET, "tests", "times.json")

    def __init__(self):
        try:
            with open(self.PATH, encoding="utf-8") as file:
                self.seconds = json.load(file)
        except (OSError, ValueError):
            self.seconds = {}

    def key(self, test):
        # Unit tests are quick, unless they are known to be slow.
        default = 0.0 if test.binary.is_unit else 1.0
        return -self.seconds.get(full_name(test), default)

    def save(self, results):
        self.seconds.update({full_name(r.test): round(r.seconds, 2) for r in results})
        os.makedirs(os.path.dirname(self.PATH), exist_ok=True)
        with open(self.PATH, "w", encoding="utf-8") as file:
            json.dump(self.seconds, file, indent=0, sort_keys=True)


# --- report --------------------------------------------------------------------------


def show(result):
    if result.verdict != "ok":
        print(f"{result.verdict}: {full_name(result.test)} ({result.seconds:.1f} s)", flush=True)


def show_output(result):
    print(f"\n---- {result.verdict}: {full_name(result.test)}\n{result.output.rstrip()}")


def show_times(results, slowest):
    by_binary = {}
    for result in results:
        name = f"{result.test.binary.package} {result.test.binary.name}"
        tests, seconds, cpu = by_binary.get(name, (0, 0.0, 0.0))
        by_binary[name] = (tests + 1, seconds + result.seconds, cpu + result.cpu)
    print(f"\n{'tests':>6} {'seconds':>8} {'of CPU':>8}  binary")
    for name, (tests, seconds, cpu) in by_binary.items():
        print(f"{tests:6} {seconds:8.1f} {cpu:8.1f}  {name}")
    if slowest:
        print(f"\n{'seconds':>8} {'of CPU':>8}  slowest tests")
    for result in sorted(results, key=lambda r: -r.seconds)[:slowest]:
        print(f"{result.seconds:8.1f} {result.cpu:8.1f}  {full_name(result.test)}")


def keep(result):
    """Writes the output of a flaky test to target/flaky, and returns the path."""
    folder = os.path.join(TARGET, "flaky")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, re.sub(r"[^\w-]+", "-", full_name(result.test)) + ".log")
    with open(path, "w", encoding="utf-8") as file:
        file.write(result.output)
    return os.path.relpath(path, ROOT)


# --- main ----------------------------------------------------------------------------


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ignored", action="store_true")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--no-rerun", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--slowest", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--only", default="")
    parser.add_argument("--except", dest="unwanted", default="")
    return parser.parse_args()


def choose(options, found):
    """The tests to run several at a time, and those to run one after the other."""
    everything = {full_name(test) for binary in found for test in tests_of(binary)}
    clock = clock_names()
    if missing := sorted(clock - everything):
        stop("scripts/clock-tests.txt names tests that do not exist:\n  " + "\n  ".join(missing))
    if options.ignored:
        return [], [test for binary in found for test in tests_of(binary, "--ignored")]
    ignored = {test for binary in found for test in tests_of(binary, "--ignored")}
    tests = [test for binary in found for test in tests_of(binary) if test not in ignored]
    if options.quick:
        names = [full_name(test) for test in tests]
        if not all(any(map(kind.match, names)) for kind in QUICK):
            stop("some tests of --quick do not exist")
        tests = [
            test
            for test in tests
            if test.binary.is_unit or any(kind.match(full_name(test)) for kind in QUICK)
        ]
    if options.alone:
        return [], tests
    apart = [test for test in tests if full_name(test) in clock]
    return [] if options.clock else [t for t in tests if full_name(t) not in clock], apart


def is_wanted(options, name):
    return options.only in name and not (options.unwanted and options.unwanted in name)


def interrupt(_number, _frame):
    raise KeyboardInterrupt


def main():
    # Tests are in sessions of their own: they must be stopped, too.
    signal.signal(signal.SIGTERM, interrupt)
    options = arguments()
    found = binaries()
    chosen = choose(options, found)
    skipped = sum(len(tests_of(binary)) for binary in found) - sum(map(len, chosen))
    together, apart = [
        [test for test in tests if is_wanted(options, full_name(test))] * options.repeat
        for tests in chosen
    ]
    if not together and not apart:
        stop("no test name matches --only and --except")
    jobs = options.jobs or int(found[0].environment.get("RUST_TEST_THREADS", os.cpu_count()))
    runner, times, results = Runner(options.timeout), Times(), []

    def done(result):
        results.append(result)
        show(result)

    together.sort(key=times.key)
    run_all(runner, together, jobs, False, done)
    run_all(runner, apart, 1, True, done)
    times.save([result for result in results if result.verdict == "ok"])

    failed = [result for result in results if result.verdict != "ok"]
    flaky = [] if options.no_rerun else flaky_ones(runner, failed, apart)
    show_times(results, options.slowest)
    return report(results, failed, flaky, skipped)


def run_all(runner, tests, jobs, alone, done):
    started = time.monotonic()
    print(f"{len(tests)} tests, {jobs} at a time", flush=True)
    runner.several(tests, jobs, done, alone)
    print(f"{time.monotonic() - started:.0f} seconds", flush=True)


def flaky_ones(runner, failed, apart):
    """Those of the failed tests that pass twice when they run again."""
    flaky, red = [], 0
    for result in failed:
        if red == ENOUGH_RED:
            break
        is_flaky = result.verdict == "FAILED" and passes_twice(runner, result.test, apart)
        red += not is_flaky
        flaky += [result] if is_flaky else []
    return flaky


def passes_twice(runner, test, apart):
    again = []
    runner.several([test] * 2, 1, again.append, alone=test in apart)
    passed = sum(result.verdict == "ok" for result in again)
    print(f"run again: {full_name(test)} passed {passed} of 2 times", flush=True)
    return passed == len(again)


def report(results, failed, flaky, skipped):
    """Prints failures and the verdict, and returns the exit code."""
    red = [result for result in failed if result not in flaky]
    for result in failed:
        show_output(result)
    print()
    for result in red:
        print(f"{result.verdict} {full_name(result.test)}")
    for result in flaky:
        print(f"kept in {keep(result)}")
    print(f"{len(results) - len(red)} passed, {len(red)} failed, {skipped} skipped")
    for result in flaky:
        print(f"FLAKY {full_name(result.test)}")
    return 1 if red else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3:])
        sys.exit()
    sys.exit(main())
