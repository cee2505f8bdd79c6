"""Steps of training, colrow beside its peers: time, memory kept for backward, on the ranks of one machine.

    python benchmarks/run.py [--case h512] [--rounds 8] [--ranks 2] [--out FILE]

All contenders run in one process group, in turn, round by round, so that a busy moment meets them alike; a ratio is the
median of the rounds' ratios. "one process" has all cores for itself (the other ranks wait asleep), the others a thread
a rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import colrow
from colrow.launch import launch
from colrow.observe import kept_tensors
from layers import CASES, Case, Layers, contenders, step

PLAIN = "one process"


def work(case: Case, rounds: int) -> dict[str, Any]:
    """One rank's part: seconds by contender and round, and the bytes that each keeps."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("every", "one"))["one"]
    torch.manual_seed(0)
    base, x = Layers(case), torch.randn(case.batch, case.sequence, case.hidden)
    entries = contenders(case, mesh, alone)
    made = {name: make(copy.deepcopy(base)) for name, (make, _, _) in entries.items()}
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    kept: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, (_, give, transport) in entries.items():
            runs = rank == 0 or not (name.startswith(PLAIN) or name == "colrow, tp 1")
            torch.set_num_threads((os.cpu_count() or 1) if name == PLAIN else 1)
            colrow.use_transport(mesh, transport)  # pyright: ignore[reportArgumentType]
            dist.barrier()
            began = time.perf_counter()
            if runs:
                given = give(x.clone()).requires_grad_()
                loss = step(made[name], given)
                if number == 0:
                    ignore = [*made[name].parameters(), given]
                    kept[name] = sum(t.untyped_storage().nbytes() for _, t in kept_tensors(loss, ignore))
                loss.backward()
                made[name].zero_grad()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "kept": kept}


def summary(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and ratios round by round."""
    seconds, kept = found["seconds"], found["kept"]
    ours = seconds["colrow TP + SP"]
    rows = {
        name: {
            "milliseconds": round(1e3 * statistics.median(times), 2),
            "ours_to_it": round(statistics.median(a / b for a, b in zip(ours, times, strict=True)), 3),
            "kept_bytes": kept[name],
            "kept_of_one_process": round(kept[name] / kept[PLAIN], 3),
        }
        for name, times in seconds.items()
    }
    return {"case": asdict(case), "rows": rows}


def show(result: dict[str, Any], ranks: int) -> None:
    case = result["case"]
    tokens = f"{case['batch']} x {case['sequence']} tokens"
    print(f"\n{case['name']}: {case['layers']} layers, hidden {case['hidden']}, {tokens}")
    print(f"{'':32} {'ms a step':>10} {'colrow TP+SP / it':>18} {'kept, MiB':>10} {'of one / ' + str(ranks):>10}")
    for name, row in result["rows"].items():
        kept, share = row["kept_bytes"] / 2**20, row["kept_of_one_process"] * ranks
        print(f"{name:32} {row['milliseconds']:>10} {row['ours_to_it']:>18} {kept:>10.1f} {share:>10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="these cases alone")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each contender (8)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to split over (2)")
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    options = parser.parse_args()
    results = []
    for case in CASES:
        if options.case is None or case.name in options.case:
            found = launch(work, case, options.rounds, ranks=options.ranks, timeout=600.0)
            results.append(summary(case, found))
            show(results[-1], options.ranks)
    if options.out is not None:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "torch": torch.__version__,
            "ranks": options.ranks,
            "rounds": options.rounds,
            "load_before": os.getloadavg()[0],
        }
        options.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
        print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
