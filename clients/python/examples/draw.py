"""Draws the numbers of protect_a_database.py."""

from __future__ import annotations

from pathlib import Path
from typing import List

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 930, 96, 360
GREY, RED, BLUE = "#757575", "#c62828", "#1565c0"
TITLE = "A database that serves some 100 queries a second, when up to four times as many come"
SUBTITLE = (
    "Callers wait for a second, try three times, and give up. With tollgate, those beyond 100 a"
    " second are told at once that it is too busy."
)


def draw(path: str, asked: List[int], without: List[int], with_tollgate: List[int]) -> None:
    """Each list has one number a second."""
    seconds = len(asked)
    top = -(-max(asked + without + with_tollgate) // 100) * 100

    def x(second: float) -> float:
        return LEFT + (RIGHT - LEFT) * second / seconds

    def y(number: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * number / top

    def points(numbers: List[int]) -> str:
        return " ".join(f"{x(s + 0.5):.1f},{y(n):.1f}" for s, n in enumerate(numbers))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(24, 30, TITLE, size=18),
        _text(24, 52, SUBTITLE, color="#555"),
        _text(24, TOP - 14, "requests a second"),
    ]
    for number in range(0, top + 1, 100):
        parts.append(_line(LEFT, y(number), RIGHT, y(number)))
        parts.append(_text(LEFT - 8, y(number) + 4.5, str(number), "end"))
    for second in range(0, seconds + 1, 5):
        parts.append(_line(x(second), BOTTOM, x(second), BOTTOM + 5))
        parts.append(_text(x(second), BOTTOM + 20, str(second), "middle"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 44, "time (seconds)", "middle"))
    ends = f"{x(0.5):.1f},{y(0):.1f} {points(asked)} {x(seconds - 0.5):.1f},{y(0):.1f}"
    parts.append(f'<polygon points="{ends}" fill="{GREY}" fill-opacity="0.15"/>')
    lines = [
        ("asked", asked, GREY, 1.5),
        ("answered in time, with tollgate", with_tollgate, BLUE, 3),
        ("answered in time, without tollgate", without, RED, 3),
    ]
    for row, (name, numbers, color, width) in enumerate(lines):
        parts.append(
            f'<polyline points="{points(numbers)}" fill="none" stroke="{color}"'
            f' stroke-width="{width}" stroke-linejoin="round"/>'
        )
        # To the right of the peak, where there is room.
        left, base = x(0.68 * seconds), TOP + 16 + 20 * row
        parts.append(_line(left, base - 4.5, left + 24, base - 4.5, color, 3))
        parts.append(_text(left + 32, base, name))
    Path(path).write_text("\n".join([*parts, "</svg>", ""]))


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 13, color: str = "#212121"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{color}">{text}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str = "#e0e0e0", width: float = 1
) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'
