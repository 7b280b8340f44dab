"""Draws the pictures of the documentation, docs/pictures/*.svg, from the text below: ``python docs/pictures.py``.

They are SVG and not a fenced diagram, because the site must show them without a network, and the package index the
README's.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
#: Fill and line of each kind of box.
KINDS = {
    "node": ("#f6f8fa", "#8c959f"),
    "ours": ("#d8ecf3", "#1f5fbf"),
    "theirs": ("#ffffff", "#57606a"),
    "disk": ("#fbe9d0", "#b35900"),
}
OURS, THEIRS = "#1f5fbf", "#57606a"
LINE = 17


class Picture:
    """An SVG of boxes, arrows and words.

    Args:
        width: in pixels, as all numbers of this class
        height: the same
        title: what it shows, for those who cannot see it
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="12.5">',
            f"<title>{escape(title)}</title>",
            "<defs>",
            *(
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
                for name, colour in (("ours", OURS), ("theirs", THEIRS))
            ),
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def words(
        self, x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False, fill: str = "#1f2328"
    ) -> None:
        """Writes lines, the first with its base at ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        for at, line in enumerate(text.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + at * LINE:g}" text-anchor="{anchor}" fill="{fill}"{weight}>'
                f"{escape(line)}</text>"
            )

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str, text: str = "") -> None:
        """Draws a box with a title at its top and lines below."""
        fill, line = KINDS[kind]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{line}"/>'
        )
        self.words(x + width / 2, y + 19, title, bold=True)
        if text:
            self.words(x + width / 2, y + 19 + LINE, text)

    def arrow(
        self,
        points: str,
        label: str = "",
        at: tuple[float, float] | None = None,
        *,
        ours: bool = True,
        both: bool = False,
        anchor: str = "middle",
    ) -> None:
        """Draws a line with a head, through ``points``, and words with the base of the first at ``at``."""
        name, colour = ("ours", OURS) if ours else ("theirs", THEIRS)
        dash = "" if ours else ' stroke-dasharray="5 4"'
        start = f' marker-start="url(#{name})"' if both else ""
        self._parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}{start} '
            f'marker-end="url(#{name})"/>'
        )
        if label and at is not None:
            self.words(*at, label, anchor=anchor, fill=colour)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#d0d7de") -> None:
        """Draws a thin line."""
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"/>')

    def text(self) -> str:
        """Returns the SVG."""
        return "\n".join([*self._parts, "</svg>", ""])


def ports() -> Picture:
    """Who connects to whom, on which port."""
    p = Picture(920, 520, "Who connects to whom, and on which port, in a torchft job with keepers")
    p.box(330, 22, 260, 50, "theirs", "torchft lighthouse", "port 29510, or as --bind says")
    p.box(20, 120, 330, 380, "node", "node of a healthy replica")
    p.box(570, 120, 330, 380, "node", "node of the replica that heals")
    p.box(45, 155, 280, 45, "theirs", "torchft Manager", "any free port")
    p.box(595, 155, 280, 45, "theirs", "torchft Manager", "any free port")
    p.box(45, 235, 280, 62, "ours", "HTTPTransport", "TENSORFERRY_PORT,\notherwise any free port")
    p.box(595, 235, 280, 62, "ours", "HTTPTransport", "the healing side needs no\nport that is open")
    p.box(45, 320, 280, 62, "ours", "counters and status page", "TENSORFERRY_METRICS_PORT,\nif it is set")
    p.box(390, 318, 170, 45, "theirs", "Prometheus, a", "browser, anywhere")
    p.box(45, 415, 280, 62, "ours", "tensorferry keeper", "--port; its own trainers\nby a local socket")
    p.box(595, 415, 280, 62, "ours", "tensorferry keeper", "--port; its own trainers\nby a local socket")
    p.arrow("60,155 60,47 330,47", "quorum", (70, 100), ours=False, anchor="start")
    p.arrow("860,155 860,47 590,47", "quorum", (850, 100), ours=False, anchor="end")
    p.arrow("595,178 325,178", "which URL?", (460, 172), ours=False)
    p.arrow("595,262 325,262", "GET the state: TCP, the host\nand port of metadata()", (460, 235))
    p.arrow("390,342 325,342")
    p.words(475, 308, "GET /metrics", fill=OURS)
    p.arrow("595,446 325,446", "GET snapshots\n(buddies, both ways)", (460, 421), both=True)
    return p


def life() -> Picture:
    """The life of a checkpoint in a step of torchft."""
    p = Picture(920, 615, "The life of a checkpoint in a step of torchft")
    lanes = {120: ("training loop and", "Manager, healthy"), 345: ("HTTPTransport,", "healthy"),
             575: ("HTTPTransport,", "healing"), 800: ("Manager and training", "loop, healing")}  # fmt: skip
    for x, (first, second) in lanes.items():
        p.box(x - 90, 14, 180, 46, "ours" if "HTTP" in first else "theirs", first, "")
        p.words(x, 50, second, bold=True)
        p.line(x, 60, x, 605, "#8c959f")

    def note(y: int, text: str, x: int = 460, width: int = 820) -> None:
        p.box(x - width / 2, y, width, 26, "node", "")
        p.words(x, y + 18, text)

    note(74, "the step begins: quorum finds that one replica is behind, at another step than the others")
    p.arrow("120,135 345,135", "send_checkpoint(step)", (232, 129))
    p.words(355, 133, "published: CPU memory where", anchor="start")
    p.words(355, 150, "it is, GPU memory as a copy", anchor="start")
    p.arrow("800,185 120,185", "which URL has the state? the answer is metadata()", (460, 179), ours=False)
    p.arrow("800,220 575,220", "recv_checkpoint(URL, step)", (687, 214))
    p.arrow("575,255 345,255", "header, then ranges of bytes", (460, 249))
    p.arrow("345,290 575,290", "bytes, over several connections", (460, 284))
    p.arrow("575,325 345,325", "checksums of all blocks?", (460, 319))
    p.words(585, 329, "blocks that differ come again", anchor="start")
    p.arrow("575,365 800,365", "the verified state", (687, 359))
    note(240, "forward, backward", 120, 160)
    p.words(120, 284, "the tensors do not\nchange meanwhile")
    note(390, "gradients are reduced among the replicas; the one that heals adds zeros")
    note(430, "load_state_dict", 800, 160)
    note(470, "should_commit: the ranks of each replica agree that all went well")
    p.arrow("120,520 345,520", "disallow_checkpoint()", (232, 514))
    p.words(355, 516, "receives that run may end, or are", anchor="start")
    p.words(355, 533, "cut off at the time-out", anchor="start")
    p.arrow("345,550 120,550", "nobody reads any more", (232, 544))
    p.box(40, 572, 160, 26, "theirs", "optimizer.step()")
    p.box(720, 572, 160, 26, "theirs", "optimizer.step()")
    return p


#: Who dies, and whether the last snapshot can then be had from: the trainer, keeper, buddy, disk.
DEATHS = [
    ("one replica of several", "other replicas", "yes", "yes", "yes"),
    ("all trainers of a node", "-", "yes", "yes", "yes"),
    ("the process that writes", "yes", "yes", "yes", "earlier saves"),
    ("the keeper", "yes", "-", "yes", "yes"),
    ("the whole node", "other replicas", "-", "yes", "if shared"),
    ("all nodes", "-", "-", "-", "if shared"),
]


def survivors() -> Picture:
    """Trainer, writer, keeper and buddy, and what survives which death."""
    p = Picture(920, 590, "Trainer, writer, keeper and buddy, and what survives which death")
    p.box(20, 14, 600, 310, "node", "node 1")
    p.box(670, 14, 230, 180, "node", "node 2")
    p.box(45, 62, 200, 48, "theirs", "trainer", "its state, on CPU or GPU")
    p.box(45, 176, 200, 48, "ours", "shared memory", "one copy for each snapshot")
    p.box(
        380, 70, 215, 62, "ours", "process that writes", "finishes what it has accepted,\nalso when the trainer is gone"
    )
    p.box(380, 220, 215, 79, "ours", "keeper", "holds the same memory,\nwhatever becomes of the\ntrainer")
    p.box(690, 90, 190, 79, "ours", "keeper, the buddy", "a copy of the newest\nsnapshots of node 1")
    p.box(690, 235, 190, 62, "disk", "disk", "a folder for each save,\ncommitted by a rename")
    p.arrow("145,110 145,176", "save: copied\nonce", (155, 138), anchor="start")
    p.arrow("245,190 310,190 310,101 380,101", "no copy", (318, 152), anchor="start")
    p.arrow("245,210 310,210 310,262 380,262", "no copy", (318, 245), anchor="start")
    p.arrow("595,92 640,92 640,250 690,250")
    p.arrow("595,275 655,275 655,130 690,130")
    p.words(664, 218, "HTTP, with checksums", anchor="start", fill=OURS)
    p.words(145, 262, "A trainer that starts again\nloads from the keeper, then the\nbuddy, then the disk.")
    columns = (40, 320, 480, 610, 750)
    for x, head in zip(columns, ("who dies", "a trainer's memory", "the keeper", "its buddy", "the disk"), strict=True):
        p.words(x, 358, head, anchor="start", bold=True)
    for at, row in enumerate(DEATHS):
        y = 390 + at * 32
        p.line(30, y - 21, 890, y - 21)
        for x, cell in zip(columns, row, strict=True):
            p.words(x, y, cell, anchor="start", fill="#8c959f" if cell == "-" else "#1f2328")
    return p


PICTURES = {"ports": ports, "life": life, "survivors": survivors}


def draw(folder: Path = FOLDER) -> None:
    """Writes all pictures."""
    for name, make in PICTURES.items():
        (folder / f"{name}.svg").write_text(make().text())


if __name__ == "__main__":
    draw()
