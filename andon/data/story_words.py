"""The words and sentences of the built-in stories; `stories.py` describes how they are combined.

Each value of a slot is one word, each sentence ends with its only full stop, and no value needs "an". A model
must remember only the hero and the colour, and most repeated words follow from them, so a small model learns to
write consistent stories within a few million tokens.
"""

from importlib.resources import files

# Chosen once in a story that mentions them.
CAST = {
    "hero": ("Anna", "Emma", "Lily", "Mia", "Ruby", "Zoe", "Ben", "Finn", "Jack", "Leo", "Sam", "Tom"),
    "colour": ("blue", "green", "pink", "red", "white", "yellow"),
}

# Words that follow from a member of the cast: which member, and the word for each of its values in order.
FOLLOWERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "he": ("hero", ("she",) * 6 + ("he",) * 6),
    "He": ("hero", ("She",) * 6 + ("He",) * 6),
    "him": ("hero", ("her",) * 6 + ("him",) * 6),
    "his": ("hero", ("her",) * 6 + ("his",) * 6),
    "child": ("hero", ("girl",) * 6 + ("boy",) * 6),
    "pal": ("hero", ("Dot", "Bo", "Coco", "Pip", "Fizz", "Button", "Gus", "Nibs", "Waffle", "Moe", "Tuffy", "Pepper")),
    "pet": ("hero", ("cat", "pony", "rabbit", "dog", "duck", "goat", "cat", "rabbit", "dog", "pony", "duck", "goat")),
    "elder": ("hero", ("Mom", "Dad", "Grandma", "Grandpa") * 3),
    "toy": ("colour", ("boat", "train", "ball", "car", "kite", "drum")),
    "cover": ("colour", ("coat", "tent", "blanket", "scarf", "blanket", "coat")),
    "gift": ("colour", ("bowl", "hat", "scarf", "card", "hat", "card")),
    "ride": ("colour", ("bike", "cart", "sled", "cart", "sled", "bike")),
    "pot": ("colour", ("bowl", "pot", "cup", "box", "cup", "pot")),
    "basket": ("colour", ("bag", "basket", "box", "bowl", "bag", "basket")),
    "treat": ("colour", ("plums", "grapes", "cookies", "berries", "nuts", "pears")),
}

# Chosen again at each occurrence.
LOCAL = {
    "weather": ("bright", "calm", "cool", "quiet", "sunny", "warm"),
    "time": ("afternoon", "day", "evening", "morning"),
    "place": ("field", "forest", "garden", "meadow", "park", "valley"),
    "kind": ("brave", "clever", "gentle", "kind", "quiet", "sweet"),
    "size": ("funny", "gentle", "little", "playful", "small", "young"),
    "happy": ("cheerful", "glad", "happy", "proud"),
    "sad": ("sad", "unhappy", "upset", "worried"),
    "softly": ("gently", "kindly", "softly", "warmly"),
    "slowly": ("carefully", "gently", "slowly"),
    "near": ("behind", "beside", "near", "under"),
    "hide": ("bush", "fence", "log", "rock", "tree"),
    "spot": ("bench", "bridge", "gate", "wagon"),
    "tiny": ("little", "small", "tiny"),
    "flower": ("bean", "daisy", "rose", "tulip"),
    "critter": ("bird", "frog", "hen", "mouse", "turtle"),
    "glue": ("glue", "paper", "string", "tape"),
    "soft": ("grass", "hay", "leaves", "mud"),
    "stone": ("log", "rock", "stick"),
    "dark": ("dark", "gray"),
    "loud": ("funny", "loud", "strange"),
    "good": ("good", "great", "lovely"),
    "song": ("cheerful", "funny", "happy", "little"),
    "pretty": ("bright", "lovely", "pretty"),
    "look": ("dig", "look", "search"),
    "food": ("bread", "cake", "pie", "soup"),
    "sweet": ("happy", "lovely", "quiet", "sweet"),
}

Sentences = tuple[tuple[str, ...], ...]
"""The sentences of a part of a story, each as its alternative wordings."""


def read_sentences() -> dict[str, Sentences]:
    """Read the parts of `plots.txt` by name: the opening, the closing, and the plots that come between them."""
    text = (files("andon.data") / "plots.txt").read_text(encoding="utf-8")
    parts: dict[str, Sentences] = {}
    for part in text.split("\n[")[1:]:
        name, _, sentences = part.partition("]\n")
        parts[name] = tuple(tuple(lines.split("\n")) for lines in sentences.strip().split("\n\n"))
    return parts
