# SPDX-License-Identifier: Apache-2.0
"""Whole updates over `nccl` into worker processes, beside what others do with
the same bytes and beside what the machine allows.

  bench_broadcast.py [--json] [--rounds N] [--only CASE[,CASE...]]
                     [--peers NAME[,NAME...]] [--workers N...] [--quick]

Cases: smol, large (one host, 1, 2 and 4 workers), veth, shaped, overlap
(hosts made of network namespaces), empty. All parties of a case live at once
and take turns; ratios are taken turn by turn. --quick: little of everything,
a smoke test whose figures mean nothing. See bench/README.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent),
                *(str(Path(__file__).parents[1] / "tests" / part)
                  for part in ("harness", "reference"))]
from broadcast_rig import (  # noqa: E402
    FINDERS, PROGRAM, Hosts, Lost, NotHere, Party, Report, Set, Tensor, Way,
    a_set, batches, even, find_peers, opened, own, ratios, smol, spread,
    take_turns,
)

MEMORY_GOAL = 1.3  # x the limit, on one host and on a link that is not shaped


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.report = Report(args.json, judges=not args.quick)
        self.rounds, self.quick = args.rounds, args.quick
        self.ferry, self.workers = args.ferry, args.workers
        names = [n for n in args.peers.split(",") if n]
        self.peers, self.missing = find_peers(names)

    def tensors(self, full: Sequence[Tensor]) -> Sequence[Tensor]:
        return even(12, 96, 256) if self.quick else full


# ---- one host ----


def one_host(run: Run, what: Set, workers: int) -> None:
    """Ferry, the limits and the peers, in as few batches as memory takes."""
    always = [own(run.ferry), own("ring"), own("memcpy")]
    if run.ferry == "ferry":
        always.insert(1, own("ferry_plain"))
    times: dict[str, list[float]] = {}
    ratio: dict[str, dict[str, float]] = {}
    missing, about = dict(run.missing), {}
    for batch in batches(always, run.peers, what, workers):
        got, about = one_batch(run, batch, len(always), what, workers, missing)
        for name, ms in got.items():
            times.setdefault(name, []).extend(ms)
            if name != run.ferry:
                ratio[name] = ratios(got[run.ferry], ms)
    rows_of_one_host(run, f"{what.name}, {workers} "
                     f"worker{'s' if workers > 1 else ''}", what, times, ratio,
                     missing, about, workers <= 2)


def one_batch(run: Run, ways: list[Way], n_always: int, what: Set,
              workers: int, missing: dict[str, str]
              ) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """A peer that does not start or fails is told of and left out."""
    with opened(ways[:n_always], what, workers) as parties:
        extra = []
        try:
            for way in ways[n_always:]:
                party = Party(way, what, workers)
                extra.append(party)
                try:
                    party.ready()
                except Lost as lost:
                    missing[way.name] = str(lost)
                    extra.pop().close()
            lost: dict[str, str] = {}
            times = take_turns([*parties, *extra], run.rounds, lost)
            for party in parties:
                if party.name in lost:
                    raise Lost(lost[party.name])
            missing.update(lost)
            return times, parties[0].about()
        finally:
            for party in extra:
                party.close()


def rows_of_one_host(run: Run, case: str, what: Set,
                     times: dict[str, list[float]],
                     ratio: dict[str, dict[str, float]],
                     missing: dict[str, str], about: dict[str, Any],
                     has_goal: bool) -> None:
    spreads = {name: spread(ms) for name, ms in times.items()}
    limit = ratio["ring"]["median"]
    more = {"ferry_ms": spreads[run.ferry], "megabytes": what.bytes / 1e6,
            "about": about}
    if "ferry_plain" in spreads:
        more["without_digests_ms"] = spreads["ferry_plain"]
    run.report.row(
        f"{case}: memory", limit, "x a shared ring",
        limit=spreads["ring"]["median"],
        goal=MEMORY_GOAL if has_goal else None,
        ok=not has_goal or limit <= MEMORY_GOAL,
        peers={"ring_ms": spreads["ring"], "memcpy_ms": spreads["memcpy"]},
        ratio=ratio["ring"], times_memcpy=ratio["memcpy"], **more)
    names = [name for name in FINDERS if name in ratio]
    if not names:
        run.report.skipped(f"{case}: peers", "no peer can be had")
        return
    worst = max(names, key=lambda name: ratio[name]["median"])
    value = ratio[worst]["median"]
    run.report.row(
        f"{case}: peers", value, f"x {worst}, the fastest of them",
        limit=spreads[worst]["median"], goal=1.0 if has_goal else None,
        ok=not has_goal or value < 1.0,
        peers={f"{name}_ms": spreads[name] for name in names},
        ratios={name: ratio[name]["median"] for name in names},
        missing=missing, **more)


def case_smol(run: Run) -> None:
    with a_set("smol", run.tensors(smol(30))) as what:
        for workers in run.workers or ([1, 2] if run.quick else [1, 2, 4]):
            one_host(run, what, workers)


def case_large(run: Run) -> None:
    with a_set("1 GiB", run.tensors(even(32, 4096, 4096))) as what:
        for workers in run.workers or ([1] if run.quick else [1, 2]):
            one_host(run, what, workers)


# ---- several hosts ----


def case_veth(run: Run) -> None:
    """Between hosts whose links nothing holds back."""
    with a_set("smol", run.tensors(smol(30))) as what, Hosts(1) as hosts, \
            opened([own(run.ferry), own("stream")], what, 1,
                   *hosts.arguments(1)) as parties:
        times = take_turns(parties, run.rounds)
        about = parties[0].about()
    ratio = ratios(times[run.ferry], times["stream"])
    run.report.row("veth, 1 host", ratio["median"], "x a plain stream",
                   limit=spread(times["stream"])["median"], goal=MEMORY_GOAL,
                   ok=ratio["median"] <= MEMORY_GOAL,
                   peers={"stream_ms": spread(times["stream"])}, ratio=ratio,
                   ferry_ms=spread(times[run.ferry]),
                   megabytes=what.bytes / 1e6, about=about)


MBIT = 1000


def shaped_set(run: Run) -> Sequence[Tensor]:
    """Half a second on the wire, in pieces that a paced source can spread."""
    return run.tensors(even(64, 512, 1024))


def case_shaped(run: Run) -> None:
    """1, 2 and 4 hosts and a plain stream on links of 1 Gbit/s."""
    counts = [1, 2, 4]
    with a_set("even", shaped_set(run)) as what, Hosts(4, MBIT) as hosts:
        parties: list[Party] = []
        try:
            for way, workers in [(own("stream"), 1),
                                 *((own(run.ferry), n) for n in counts)]:
                parties.append(Party(way, what, workers,
                                     *hosts.arguments(workers)).ready())
                if way.name == run.ferry:
                    parties[-1].name = f"{workers}"
            times = take_turns(parties, run.rounds)
            about = parties[-1].about()
        finally:
            for party in parties:
                party.close()
    spreads = {f"hosts_{name}_ms" if name != "stream" else "stream_ms":
               spread(ms) for name, ms in times.items()}
    grown = ratios(times["4"], times["1"])
    run.report.row("shaped, 4 hosts", grown["median"], "x 1 host",
                   limit=spread(times["1"])["median"], goal=1.15,
                   ok=grown["median"] <= 1.15, peers=spreads, ratio=grown,
                   megabytes=what.bytes / 1e6, mbit=MBIT, about=about)
    for count in counts:
        share = ratios(times["stream"], times[f"{count}"])
        run.report.row(f"shaped, {count} host{'s' if count > 1 else ''}: rate",
                       share["median"], "x a plain stream's",
                       limit=spread(times["stream"])["median"], goal=0.9,
                       ok=share["median"] >= 0.9, peers=spreads, ratio=share,
                       megabytes=what.bytes / 1e6, mbit=MBIT)


def case_overlap(run: Run) -> None:
    """A source that takes as long as the shaped wire does."""
    with a_set("even", shaped_set(run)) as what, Hosts(1, MBIT) as hosts, \
            opened([own(run.ferry)], what, 1, *hosts.arguments(1)) as (plain,):
        pace = spread([plain.ms() for _ in range(3)])["median"]
        with opened([own(run.ferry)], what, 1, *hosts.arguments(1), "--pace",
                    f"{pace:.3f}") as (paced,):
            wire, source, both = [], [], []
            for _ in range(run.rounds):
                wire.append(plain.ms())
                source.append(paced.ms("pass"))
                both.append(paced.ms())
            paced.check()
    longer = [max(pair) for pair in zip(wire, source)]
    ratio = ratios(both, longer)
    run.report.row("overlap, 1 host", ratio["median"],
                   "x the longer of the two",
                   limit=spread(longer)["median"], goal=1.2,
                   ok=ratio["median"] <= 1.2,
                   peers={"wire_ms": spread(wire),
                          "source_ms": spread(source)},
                   ferry_ms=spread(both), ratio=ratio, mbit=MBIT)


# ---- a round without parameters ----


def case_empty(run: Run) -> None:
    """Over HTTP to a server of two ranks."""
    import checkpoints
    from ferry_server import Server

    turns = 5 if run.quick else max(101, 20 * run.rounds)
    with tempfile.TemporaryDirectory(prefix="ferry-bench.") as name:
        work = Path(name)
        model = work / "tiny"
        checkpoints.make(str(model), arch="llama", variant="gqa", seed=1,
                         dtype="BF16")
        with Server(work / "serve", model, "--load-format", "dummy",
                    "--serve-unsynced", "--threads", "1",
                    "--tensor-parallel-size", "2", "--weight-transfer-config",
                    '{"backend":"nccl"}') as server:
            party = Party(Way("empty", [str(PROGRAM), "empty", server.url]),
                          None, 0)
            try:
                party.ready()
                rounds, noops = [], []
                for _ in range(turns):
                    rounds.append(party.ms("round"))
                    noops.append(party.ms("noop"))
            finally:
                party.close()
            done = server.status()["rounds_finished"]
            if done != turns + 1:
                raise Lost(f"{done} rounds instead of {turns + 1}")
    ratio = ratios(rounds, noops)
    value = spread(rounds)["median"] / spread(noops)["median"]
    run.report.row("empty round, 2 ranks", value, "x a no-op round trip",
                   limit=spread(noops)["median"], goal=3.0, ok=value <= 3.0,
                   peers={"noop_ms": spread(noops)}, ferry_ms=spread(rounds),
                   ratio=ratio, turns=turns)


CASES = {"smol": case_smol, "large": case_large, "veth": case_veth,
         "shaped": case_shaped, "overlap": case_overlap, "empty": case_empty}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="9; quick: 2")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--peers", default=",".join(FINDERS))
    parser.add_argument("--workers", type=int, nargs="*",
                        help="of smol and large")
    parser.add_argument("--ferry", default="ferry",
                        choices=["ferry", "ferry_plain", "ferry_ipc"],
                        help="which of Ferry's ways the goals are held to")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 9)
    only = args.only.split(",")
    if set(only) - set(CASES) or set(args.peers.split(",")) - {*FINDERS, ""}:
        parser.error(f"cases are {', '.join(CASES)}; peers "
                     f"{', '.join(FINDERS)}")
    # So that parties, hosts and files in memory go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(args)
    for case in only:
        try:
            CASES[case](run)
        except NotHere as why:
            run.report.skipped(case, str(why))
        except Lost as lost:
            print(f"bench_broadcast: {case}: {lost}", file=sys.stderr)
            return 1
    if run.report.rows == 0:
        return 1
    return 0 if run.report.good else 2


if __name__ == "__main__":
    sys.exit(main())
