"""What a call graph says in words and numbers: sizes, pools, what passes between them, and who runs when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.core.graph import DRIVER, Call, Graph, RoleSize

__all__ = [
    "HELD",
    "MEMORY",
    "PASSES",
    "STAGES",
    "aligned",
    "call_size",
    "count",
    "memory",
    "pool_table",
    "role_table",
    "stage_table",
    "transfer_table",
]

Rows = list[tuple[str, ...]]
MEMORY = ("weights", "gradients", "optimizer")

HELD = "What each worker process of a pool holds."
PASSES = (
    "What passes in a step: inside a pool in place or mapped; else mapped on one machine, sent to another. Without text."
)
STAGES = "Who runs when: a call starts when what it reads is there and its pool is free. Calls in one row run side by side."


def memory(size: int) -> str:
    """Bytes in a unit that people read; empty for none."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B" if size else ""


def count(number: int) -> str:
    """134,515,008 -> 134.5M."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:,}"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[str]) -> Iterator[str]:
    """Lines of a table. The first row is the header; columns of numbers stand ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if name in right else text.ljust(width)
            for name, text, width in zip(rows[0], row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def call_size(call: Call, unit: str) -> str:
    """Rows, and tokens or steps, of a call, and how often a step makes it."""
    read = f"{'prompt ' if call.kind == 'generate' else ''}{unit}"
    parts = [f"{call.rows:,} rows"]
    parts += [f"{number:,} {what}" for number, what in ((call.tokens_in, read), (call.tokens_out, f"new {unit}")) if number]
    return ", ".join(parts) + (f", {call.times} times" if call.times > 1 else "")


def role_table(graph: Graph) -> Rows:
    """With its header: the roles. Where all of them are in one process: without the columns of pools, and with the sums."""
    header = ("role", "worker", "pool", "mesh", "where", "parameters", "trained", "dtype", *MEMORY, "model")
    rows = [header, *map(_role_row, graph.roles)]
    if graph.pools:
        return rows
    sums = [sum(getattr(role, f"{name}_bytes") for role in graph.roles) for name in ("weight", "gradient", "optimizer")]
    return [row[:2] + row[4:] for row in (*rows, ("together", *[""] * 7, *map(memory, sums), ""))]


def _role_row(role: RoleSize) -> tuple[str, ...]:
    trained = "frozen" if not role.trained else "all" if role.trained == role.parameters else count(role.trained)
    network = (count(role.parameters), trained, role.dtype) if role.parameters else ("", "", "")
    sizes = (memory(role.weight_bytes), memory(role.gradient_bytes), memory(role.optimizer_bytes))
    return (role.name, role.worker, role.pool, role.mesh, role.where, *network, *sizes, role.model)


def pool_table(graph: Graph) -> Rows:
    """With its header: the pools, the roles on them, and what a worker of a pool holds."""
    rows: Rows = [("pool", "workers", "weights", "gradients", "optimizer", "roles")]
    for pool in graph.pools:
        sizes = (memory(pool.weight_bytes), memory(pool.gradient_bytes), memory(pool.optimizer_bytes))
        rows.append((pool.name, " + ".join(map(str, pool.nodes)), *sizes, ", ".join(pool.roles)))
    return rows


def transfer_table(graph: Graph) -> Rows:
    """With its header: from where to where how much passes in a step."""
    passing = [(t.source, t.target, t.what, memory(t.bytes)) for t in graph.transfers() if t.bytes]
    return [("from", "to", "what", "bytes"), *passing]


def stage_table(graph: Graph) -> Rows:
    """With its header: a row for each stage, a column for each pool, and for the driver if it does more than give rows."""
    stages = graph.stages()
    used = {graph.pool_of(call) for stage in stages for call in stage}
    places = [*([DRIVER] if DRIVER in used else []), *(pool.name for pool in graph.pools)]
    rows: Rows = [("stage", *places)]
    for number, stage in enumerate(stages, 1):
        names = {graph.pool_of(call): call.name for call in stage}
        rows.append((str(number), *(names.get(place, "") for place in places)))
    return rows
