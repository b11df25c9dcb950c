"""Tales in English and German, made by rules: text in two languages without a download, for `configs/two-languages.toml`.

    python examples/tales.py out/two-languages/text
    python -m flashckpt.trainer data prepare --config configs/two-languages.toml
    dlrun --nproc-per-node 2 -m flashckpt.trainer --config configs/two-languages.toml

Each tale has a hero, another, a thing that is found and given away, and an end. Files are the same each time.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

TALES = 40  # in a file
FILES = 50  # of a language

PEOPLE = [
    ("king", "König", "m"), ("queen", "Königin", "f"), ("miller", "Müller", "m"), ("girl", "Mädchen", "n"),
    ("farmer", "Bauer", "m"), ("fisher", "Fischer", "m"), ("child", "Kind", "n"), ("witch", "Hexe", "f"),
    ("tailor", "Schneider", "m"), ("maid", "Magd", "f"), ("hunter", "Jäger", "m"), ("sister", "Schwester", "f"),
    ("smith", "Schmied", "m"), ("wolf", "Wolf", "m"), ("goat", "Ziege", "f"), ("raven", "Rabe", "m"),
]  # fmt: skip
THINGS = [
    ("ring", "Ring", "m"), ("key", "Schlüssel", "m"), ("crown", "Krone", "f"), ("book", "Buch", "n"), ("lamp", "Lampe", "f"),
    ("apple", "Apfel", "m"), ("sword", "Schwert", "n"), ("cup", "Tasse", "f"), ("egg", "Ei", "n"), ("coat", "Mantel", "m"),
    ("flute", "Flöte", "f"), ("bread", "Brot", "n"), ("letter", "Brief", "m"), ("coin", "Münze", "f"),
]  # fmt: skip
PLACES = [
    ("in the forest", "im Wald", "into the forest", "in den Wald"), ("by the river", "am Fluss", "to the river", "an den Fluss"),
    ("in the town", "in der Stadt", "into the town", "in die Stadt"), ("in the garden", "im Garten", "into the garden", "in den Garten"),
    ("on the mountain", "auf dem Berg", "up the mountain", "auf den Berg"), ("in the mill", "in der Mühle", "to the mill", "zu der Mühle"),
    ("at the well", "am Brunnen", "to the well", "zu dem Brunnen"), ("in the castle", "im Schloss", "to the castle", "zu dem Schloss"),
]  # fmt: skip
MOODS = [
    ("tired", "müde"), ("glad", "froh"), ("poor", "arm"), ("afraid", "ängstlich"), ("proud", "stolz"), ("hungry", "hungrig"),
    ("alone", "allein"), ("old", "alt"), ("sad", "traurig"), ("clever", "klug"),
]  # fmt: skip
TIMES = [
    ("In the morning", "Am Morgen"), ("In the evening", "Am Abend"), ("One day", "Eines Tages"), ("In winter", "Im Winter"),
    ("After three days", "Nach drei Tagen"), ("At midnight", "Um Mitternacht"), ("The next day", "Am nächsten Tag"),
]  # fmt: skip
FOUND = [("found", "fand"), ("saw", "sah"), ("stole", "stahl"), ("bought", "kaufte"), ("took", "nahm")]

PRONOUN = {"m": ("he", "er"), "f": ("she", "sie"), "n": ("she", "es")}  # a girl or a child
THE = {"m": ("der", "den", "dem"), "f": ("die", "die", "der"), "n": ("das", "das", "dem")}  # who, whom, to whom
A = {"m": ("ein", "einen"), "f": ("eine", "eine"), "n": ("ein", "ein")}


def a(noun: str) -> str:
    """Return an English noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def tale(draw: random.Random) -> tuple[str, str]:
    """Return a tale in English, and the same in German."""
    (hero, held, sex), (other, ander, his) = draw.sample(PEOPLE, 2)
    (home, heim, *_), (there, dort, thither, dorthin) = draw.sample(PLACES, 2)
    thing, ding, kind = draw.choice(THINGS)
    (mood, laune), (later, dann), (when, wann) = draw.choice(MOODS), *draw.sample(TIMES, 2)
    (he, er), (she, sie), (found, fand) = PRONOUN[sex], PRONOUN[his], draw.choice(FOUND)
    the, den, dem = THE[sex][0], THE[kind][1], THE[his][2]
    pairs = [
        (f"Once there was {a(hero)} who lived {home}.", f"Es war einmal {A[sex][0]} {held}, {the} {heim} lebte."),
        (f"{when} the {hero} went {thither}, because {he} was {mood}.", f"{wann} ging {the} {held} {dorthin}, weil {er} {laune} war."),
        (f"There {he} {found} {a(thing)}.", f"Dort {fand} {er} {A[kind][1]} {ding}."),
    ]  # fmt: skip
    asked = [
        (f'"Give me the {thing}!" said the {other}.', f"„Gib mir {den} {ding}!“, sagte {THE[his][0]} {ander}."),
        (f'"Who are you?" asked the {other}.', f"„Wer bist du?“, fragte {THE[his][0]} {ander}."),
        (f"The {hero} was not {mood} any more.", f"{the.capitalize()} {held} war nicht mehr {laune}."),
        (f"{later} the {other} came {thither} too.", f"{dann} kam auch {THE[his][0]} {ander} {dorthin}."),
    ]
    pairs += [asked[number] for number in sorted(draw.sample(range(len(asked)), draw.randint(1, 4)))]
    pairs.append((
        f"So the {hero} gave the {other} the {thing}, and {she} was glad.",
        f"Da gab {the} {held} {dem} {ander} {den} {ding}, und {sie} war froh.",
    ))  # fmt: skip
    if draw.random() < 0.5:
        pairs.append((f"They lived {there} to the end of their days.", f"Sie lebten {dort} bis an ihr Ende."))
    return " ".join(one for one, _ in pairs), " ".join(one for _, one in pairs)


def main(folder: Path) -> None:
    """Write the files of both languages; no tale is in both."""
    for number, language in enumerate(("english", "german")):
        (folder / language).mkdir(parents=True, exist_ok=True)
        draw = random.Random(number)
        for file in range(FILES):
            tales = [tale(draw)[number] for _ in range(TALES)]
            (folder / language / f"{file:03d}.txt").write_text("\n\n".join(tales) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
