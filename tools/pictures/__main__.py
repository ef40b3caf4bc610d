"""Write docs/pictures/*.svg."""

from pathlib import Path

from tools.pictures import rooms, token, weight

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
PICTURES = {"rooms": rooms.draw, "token": token.draw, "weight": weight.draw}


def main() -> None:
    """Draw all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
