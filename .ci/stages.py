"""Run on every push, within 75 minutes on two cores: the style, `make test`, and the stages that take turns.

All stages together take several times that long, so each push begins with one of five groups, and goes on with the
others for as long as time is left. The number of commits says which group is first: it only grows, and everybody can
count it. A push brings one commit or forty, so its group is as good as drawn by lot; only pushes that keep bringing
five, ten or fifteen commits would begin with the same group each time.

The last lines of the output list what ran, what did not and why, and the next turn of what was left out.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
LIMIT_MIN = 75  # a stage begins only if it will have ended by then
END_MIN = 85  # a stage that still runs then is ended and counts as failed; CI itself has 90 minutes
CLOSING = re.compile(r"^=+ (.*\b(?:passed|failed|skipped|deselected|errors?|no tests ran)\b.*) in [\d.]+s.*=+$")
LEFT_OUT = re.compile(r"^\S+ is left out: .*$")
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (?:\S+: )?(.*)$")


@dataclass(frozen=True)
class Stage:
    """A target of make. Where it cannot run, `make can-TARGET` fails and says in one line what is missing."""

    target: str
    minutes: float  # what it takes on two idle cores with its installation, and a third more
    arguments: tuple[str, ...] = ()
    offline: bool = False  # as a newcomer without a network has it
    part: str = ""  # which part of the target's tests the arguments choose

    @property
    def name(self) -> str:
        return f"{self.target} ({self.part})" if self.part else self.target


# Without DeepNet's runs in the grid of peaks and six notebooks at once, which take the most memory, and without the
# table of errors measured anew and the whole zoo, which take longest: `make test-all` has them.
SHORTENED = "LONG_ARGS=-k 'not whole_grid and not all_of_it and not [deep- and not notebooks_at_once and not whole_zoo'"
IN_LAB, OTHER_PAGES = "BROWSER_ARGS=-k every_cell_runs", "BROWSER_ARGS=-k 'not every_cell_runs'"
ALWAYS = (Stage("lint", 4), Stage("test", 32, offline=True))
GROUPS = (
    (Stage("test-imagined", 18), Stage("test-mnist", 16)),
    (Stage("test-long", 30, (SHORTENED,), offline=True), Stage("test-network", 7)),
    (Stage("test-browser", 36, (IN_LAB,), part="every cell"),),
    (Stage("test-oldest", 38),),
    (Stage("test-browser", 14, (OTHER_PAGES,), part="the rest"), Stage("test-slurm", 10), Stage("xla", 15)),
)


@dataclass
class Outcome:
    """What became of a stage."""

    stage: Stage
    minutes: float = 0.0
    failed: bool = False
    left_out: str = ""  # why it did not run
    is_possible: bool = True  # False: this machine lacks something
    tallies: list[str] = field(default_factory=list)  # pytest's closing lines
    parts_left_out: list[str] = field(default_factory=list)  # in make's words
    skips: Counter[str] = field(default_factory=Counter)  # tests skipped, by reason


# ---------------------------------------------------------------- whose turn it is


def in_turn(num_commits: int) -> list[Stage]:
    """Return all stages that take turns: the group whose turn it is, then the others."""
    first = num_commits % len(GROUPS)
    return [stage for group in GROUPS[first:] + GROUPS[:first] for stage in group]


def fitting(stages: Sequence[Stage], minutes_left: float) -> list[Stage]:
    """Return the stages that run one after another; where a long one does not fit, a shorter one behind it may."""
    chosen = []
    for stage in stages:
        if stage.minutes <= minutes_left:
            chosen.append(stage)
            minutes_left -= stage.minutes
    return chosen


def next_turn(stage: Stage, possible: Sequence[Stage], num_commits: int, minutes_left: float) -> int:
    """Return how many commits from now a push runs the stage, if it has as much time as this one; else its group's turn."""
    for more in range(1, len(GROUPS) + 1):
        if stage in fitting([one for one in in_turn(num_commits + more) if one in possible], minutes_left):
            return more
    return next(more for more in range(1, len(GROUPS) + 1) if stage in GROUPS[(num_commits + more) % len(GROUPS)])


# ---------------------------------------------------------------- one stage


def what_is_missing(stage: Stage) -> str:
    """Return why the stage cannot run here, or nothing."""
    asked = subprocess.run(
        ["make", "--silent", f"can-{stage.target}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = [line for line in (asked.stdout + asked.stderr).splitlines() if not line.startswith("make")]
    return "" if asked.returncode == 0 else (said or ["it does not say why"])[-1]


def take_notes(outcome: Outcome, line: str) -> None:
    """Keep what pytest says about the tests as a whole, and about those that it skipped."""
    if closing := CLOSING.match(line):
        outcome.tallies.append(closing[1])
    elif LEFT_OUT.match(line):
        outcome.parts_left_out.append(line)
    elif skipped := SKIPPED.match(line):
        outcome.skips[skipped[2]] += int(skipped[1])


def run_stage(stage: Stage, minutes_left: float) -> Outcome:
    """Run a stage, hand on its output, and end it with all that it started when no time is left."""
    outcome, start_s = Outcome(stage), time.monotonic()
    environment = {**os.environ, "FSDP_OFFLINE": "1"} if stage.offline else dict(os.environ)
    with subprocess.Popen(
        ["make", stage.target, *stage.arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as making:
        out_of_time = threading.Timer(60 * minutes_left, os.killpg, (making.pid, signal.SIGKILL))
        out_of_time.start()
        for line in making.stdout:
            print(line, end="", flush=True)
            take_notes(outcome, line.strip())
        outcome.failed = making.wait() != 0
        out_of_time.cancel()
    outcome.minutes = (time.monotonic() - start_s) / 60
    return outcome


# ---------------------------------------------------------------- all of them


def run_all(stages: Sequence[Stage], before: Sequence[Outcome], minutes_used: Callable[[], float]) -> list[Outcome]:
    """Run what fits into the time that is left; after a failure, nothing more."""
    outcomes = list(before)
    for stage in stages:
        minutes_left = LIMIT_MIN - minutes_used()
        if any(outcome.failed for outcome in outcomes):
            outcomes.append(Outcome(stage, left_out="an earlier one failed"))
        elif stage.minutes > minutes_left:
            outcomes.append(Outcome(stage, left_out=f"takes {stage.minutes} min, {minutes_left:.0f} were left"))
        elif missing := what_is_missing(stage):
            outcomes.append(Outcome(stage, left_out=missing, is_possible=False))
        else:
            outcomes.append(run_stage(stage, END_MIN - minutes_used()))
    return outcomes


def told(outcome: Outcome) -> list[str]:
    """Return the lines of the closing list about one stage."""
    name = outcome.stage.name
    if not outcome.is_possible:
        return [f"  not possible here  {name}: {outcome.left_out}"]
    if outcome.left_out:
        return [f"  not run            {name}: {outcome.left_out}"]
    verdict = "FAILED" if outcome.failed else "ran   "
    lines = [f"  {verdict}             {name}, {outcome.minutes:.0f} min: {'; '.join(outcome.tallies) or 'no tests'}"]
    lines += [f"{'':21}{part}" for part in outcome.parts_left_out]
    return lines + [f"{'':21}{count} skipped: {reason}" for reason, count in sorted(outcome.skips.items())]


def told_turns(outcomes: Sequence[Outcome], num_commits: int, minutes_left: float) -> list[str]:
    """Return the lines that say when the stages come that could run here and did not."""
    possible = [outcome.stage for outcome in outcomes if outcome.is_possible]
    waiting = [one.stage for one in outcomes if one.left_out and one.is_possible and one.stage not in ALWAYS]
    lines = []
    for stage in waiting:
        more = next_turn(stage, possible, num_commits, minutes_left)
        lines.append(f"  next turn          {stage.name}: at {num_commits + more} commits, {more} from here")
    return lines


def output_of(*command: str) -> str:
    """Return what a command prints, or why it failed, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]


def lay_out_mnist() -> None:
    """Put MNIST where tests and notebooks look, if the workplace keeps the packed files beside the project."""
    packed, raw = PROJECT.parent / "shared" / "mnist", PROJECT / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path in packed.glob("*.gz"):
        shutil.copy(path, raw)


def main() -> int:
    start_s = time.monotonic()
    os.chdir(PROJECT)

    def minutes_used() -> float:
        return (time.monotonic() - start_s) / 60

    num_commits = int(output_of("git", "rev-list", "--count", "HEAD"))
    outcomes = run_all(ALWAYS, [], minutes_used)
    minutes_left = LIMIT_MIN - minutes_used()
    lay_out_mnist()
    outcomes = run_all(in_turn(num_commits), outcomes, minutes_used)
    print(f"\n{output_of('make', '--silent', 'outdated')}")
    print(f"CI at {num_commits} commits, {minutes_used():.0f} of {LIMIT_MIN} minutes:")
    for outcome in outcomes:
        print(*told(outcome), sep="\n")
    print(*told_turns(outcomes, num_commits, minutes_left), sep="\n", flush=True)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
