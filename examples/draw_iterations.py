"""Draw what the scheduler did: a row a request, a column an iteration. Prints an SVG.

    python examples/draw_iterations.py > examples/iterations.svg

The requests are made up, the schedule is the real one: the scheduler is pure Python and runs here without a model.
"""

from orca_hf.kv_manager import KVManager
from orca_hf.request import Request
from orca_hf.scheduler import Scheduler

# (prompt tokens, tokens generated, arrives before iteration)
REQUESTS = [(6, 9, 0), (14, 4, 0), (3, 12, 0), (5, 3, 0), (4, 8, 1), (20, 5, 3), (3, 6, 6), (7, 4, 8)]
CELL, LEFT, TOP = 26, 118, 64
COLOURS = {"prompt": "#3b6ea5", "decode": "#e39b3b", "waiting": "#d9dde3"}


def schedule() -> tuple[list[dict[int, int]], int]:
    """Runs the scheduler: for each request {iteration: tokens computed}, and the number of iterations."""
    scheduler = Scheduler(KVManager(96, 4), max_batch_size=4, max_batch_tokens=12)
    requests = [Request([0] * prompt, generated) for prompt, generated, _ in REQUESTS]
    cells: list[dict[int, int]] = [{} for _ in requests]
    iteration_number = 0
    while not all(request.finished for request in requests):
        for request, (_, _, arrival) in zip(requests, REQUESTS, strict=True):
            if arrival == iteration_number:
                scheduler.submit(request)
        iteration = scheduler.schedule()
        assert iteration is not None
        for step in iteration.steps:
            cells[requests.index(step.request)][iteration_number] = (
                step.length if step.start < len(step.request.prompt) else 0
            )
        scheduler.complete(iteration)
        for step in iteration.steps:
            if step.samples:
                scheduler.append(step.request, 0)
                if len(step.request.generated) == step.request.max_new_tokens:
                    scheduler.finish(step.request)
        iteration_number += 1
    return cells, iteration_number


def draw(cells: list[dict[int, int]], num_iterations: int) -> str:
    """The picture as SVG."""
    width, height = LEFT + num_iterations * CELL + 16, TOP + len(cells) * CELL + 58
    title = "Eight requests; an iteration takes at most four of them, and 12 tokens"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" fill="#222222">{title}</text>',
    ]
    for number in range(num_iterations):
        x = LEFT + number * CELL + CELL / 2
        parts.append(f'<text x="{x}" y="{TOP - 10}" text-anchor="middle" fill="#667085">{number + 1}</text>')
    for row, (request, done) in enumerate(zip(REQUESTS, cells, strict=True)):
        y = TOP + row * CELL
        label = f"{request[0]} in, {request[1]} out"
        parts.append(f'<text x="{LEFT - 12}" y="{y + 17}" text-anchor="end" fill="#222222">{label}</text>')
        for number in range(request[2], max(done) + 1):
            length = done.get(number)
            kind = "waiting" if length is None else "prompt" if length else "decode"
            x = LEFT + number * CELL
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{COLOURS[kind]}"/>'
            )
            if length:
                parts.append(
                    f'<text x="{x + CELL / 2}" y="{y + 17}" text-anchor="middle" fill="#ffffff">{length}</text>'
                )
    x = LEFT
    for kind, text in (("prompt", "prompt tokens computed"), ("decode", "one token decoded"), ("waiting", "waiting")):
        y = TOP + len(cells) * CELL + 22
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" fill="#222222">{text}</text>')
        x += 40 + 7 * len(text)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    print(draw(*schedule()), end="")
