"""The words and sentences of the built-in stories; `stories.py` describes how they are combined.

Each value of a slot is one word, each sentence ends with its only full stop, and no value needs "an". A model
must remember only the hero and the colour, and most repeated words follow from them, so that a small model
learns to write consistent stories within a few million tokens.
"""

from __future__ import annotations

# Chosen once in a story that mentions them.
CAST = {
    "hero": ("Anna", "Emma", "Lily", "Mia", "Ruby", "Zoe", "Ben", "Finn", "Jack", "Leo", "Sam", "Tom"),
    "colour": ("blue", "green", "pink", "red", "white", "yellow"),
}

# What follows from a member of the cast: from which, and the word for each of its values in order.
FOLLOWERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "he": ("hero", ("she",) * 6 + ("he",) * 6),
    "He": ("hero", ("She",) * 6 + ("He",) * 6),
    "him": ("hero", ("her",) * 6 + ("him",) * 6),
    "his": ("hero", ("her",) * 6 + ("his",) * 6),
    "child": ("hero", ("girl",) * 6 + ("boy",) * 6),
    "pal": (
        "hero",
        ("Dot", "Bo", "Coco", "Pip", "Fizz", "Button", "Gus", "Nibs", "Waffle", "Moe", "Tuffy", "Pepper"),
    ),
    "pet": (
        "hero",
        ("cat", "pony", "rabbit", "dog", "duck", "goat", "cat", "rabbit", "dog", "pony", "duck", "goat"),
    ),
    "elder": ("hero", ("Mom", "Dad", "Grandma", "Grandpa") * 3),
    "toy": ("colour", ("boat", "train", "ball", "car", "kite", "drum")),
    "cover": ("colour", ("coat", "tent", "blanket", "scarf", "blanket", "coat")),
    "gift": ("colour", ("bowl", "hat", "scarf", "card", "hat", "card")),
    "ride": ("colour", ("bike", "cart", "sled", "cart", "sled", "bike")),
    "pot": ("colour", ("bowl", "pot", "cup", "box", "cup", "pot")),
    "basket": ("colour", ("bag", "basket", "box", "bowl", "bag", "basket")),
    "treat": ("colour", ("plums", "grapes", "cookies", "berries", "nuts", "pears")),
}

# Chosen anew wherever they stand.
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

OPENING: Sentences = (
    (
        "{hero} was a {kind} {child} who had a {size} {pet} named {pal}.",
        "{hero}, a {kind} {child}, lived with a {size} {pet} named {pal}.",
        "Once upon a time, {hero} had a {size} {pet} named {pal}.",
        "{hero} and a {size} {pet} named {pal} were best friends.",
    ),
    (
        "One {weather} {time}, {hero} and {pal} walked to the {place}.",
        "One {weather} {time}, {he} took {pal} to the {place}.",
        "On a {weather} {time}, {hero} and {pal} played in the {place}.",
        "It was a {weather} {time}, so they went to the {place}.",
    ),
)

CLOSING: Sentences = (
    (
        "That night, {hero} and {pal} fell asleep with a smile.",
        "At home, {hero} and {pal} had warm {food} and {sweet} dreams.",
        "Then {hero} and {pal} went home and ate warm {food}.",
        "From that day on, {hero} and {pal} always helped each other.",
        "It was a {good} day for {hero} and {pal} the {pet}.",
    ),
)

# A plot is what happens between the opening and the closing.
PLOTS: dict[str, Sentences] = {
    "lost": (
        (
            "{He} had a {colour} {toy} and loved it very much.",
            "{hero} carried a {colour} {toy} to play with.",
            "{hero} took along {his} {colour} {toy} to show {pal}.",
        ),
        (
            "But soon the {colour} {toy} was gone, and {hero} felt {sad}.",
            "Then {he} looked around, and the {colour} {toy} was gone.",
            "Then {hero} could not find the {colour} {toy}.",
        ),
        (
            "{He} looked {near} a {hide} and {near} a {spot}, but it was not there.",
            "{hero} looked {near} every {hide}, but there was no {toy}.",
            'They looked {near} a {hide}, and {hero} called, "Where is my {toy}?" again and again.',
        ),
        (
            '"Please help me, {pal}," said {hero} {softly}.',
            "{pal} saw that {hero} was {sad} and began to {look}.",
            "The {size} {pet} wanted to help and began to {look}.",
        ),
        (
            "{pal} ran to a {spot} and found the {colour} {toy}.",
            "Then {pal} looked {near} a {spot} and saw the {colour} {toy}.",
            "At last the {pet} came back with the {colour} {toy}.",
        ),
        (
            '"Thank you, {pal}!" said {hero}, who was {happy} again.',
            "{hero} hugged the {pet} and felt {happy} again.",
            "{hero} was so {happy} that {he} gave {pal} a big hug.",
        ),
    ),
    "broken": (
        (
            "{hero} wanted to show {pal} a {colour} {toy}.",
            "{He} brought along a {colour} {toy} from home.",
            "There {he} played with a {colour} {toy} from {elder}.",
        ),
        (
            "But the {colour} {toy} fell on a {stone} and broke.",
            "Then {he} fell over a {stone}, and the {colour} {toy} broke.",
            "All at once, the {colour} {toy} fell down and broke.",
        ),
        (
            "{hero} felt {sad}, and {pal} sat beside {him}.",
            "{He} felt so {sad} that {he} cried.",
            '"Oh no!" cried {hero}, who felt very {sad}.',
        ),
        (
            "{elder} heard {him} and came with some {glue}.",
            "Then {elder} came to help and brought some {glue}.",
            '"We can fix it," said {elder} {softly} and took out some {glue}.',
        ),
        (
            "Together {hero} and {elder} {slowly} fixed the {colour} {toy}.",
            "They worked {slowly} until the {colour} {toy} was as good as new.",
            "{hero} held the {colour} {toy} while {elder} {slowly} fixed it.",
        ),
        (
            '"Thank you, {elder}!" said {hero}, who was {happy} again.',
            "{hero} gave {elder} a big hug and felt {happy}.",
            "{pal} the {pet} danced around the {toy}, and {hero} was {happy}.",
        ),
    ),
    "rain": (
        (
            "Soon the sky was {dark}, and the rain began.",
            "Then the sky was {dark}, and it began to rain.",
            "All at once, it began to rain on {hero} and {pal}.",
        ),
        (
            "{pal} was wet and cold, and {hero} felt {sad}.",
            "The {size} {pet} was cold, so {hero} looked for a dry spot.",
            '"Poor {pal}, you are all wet!" said {hero} {softly}.',
        ),
        (
            "{He} had a {colour} {cover} in {his} bag.",
            "Then {hero} found a {colour} {cover} in {his} bag.",
            "But {hero} had brought a {colour} {cover} from home.",
        ),
        (
            "{hero} held the {colour} {cover} over {pal} and waited.",
            "They sat {near} a {hide} with the {colour} {cover} over them.",
            "{hero} and {pal} sat close together under the {colour} {cover}.",
        ),
        (
            "They sang a {song} song and waited for the sun.",
            "{hero} sang a {song} song to {pal} until the rain stopped.",
            "{He} told {pal} a {song} story about a {critter} in the rain.",
        ),
        (
            "Then the sun came out, and a {pretty} rainbow stood over them.",
            "At last the sun came back, and {hero} and {pal} felt {happy}.",
            "Soon the rain was gone, and {hero} and {pal} played again.",
        ),
    ),
    "gift": (
        (
            "It was the birthday of {elder}, and {hero} had no gift.",
            "{hero} wanted to find a gift for {elder}.",
            "There {he} thought about a gift for {elder}.",
        ),
        (
            "But {he} had no idea, and that made {him} {sad}.",
            "{He} thought and thought and felt {sad}.",
            '"What can I give to {elder}?" {hero} asked {pal} {softly}.',
        ),
        (
            "Then {pal} found some {glue}, and {hero} had a {good} idea.",
            "The {size} {pet} came with some {glue}, and {hero} had a {good} idea.",
            "Then {hero} saw some {glue} {near} a {spot} and had a {good} idea.",
        ),
        (
            "{He} worked {slowly} and made a {colour} {gift}.",
            "{hero} {slowly} made a {colour} {gift} all by {him}self.",
            "With some help from {pal}, {he} made a {colour} {gift}.",
        ),
        (
            "{hero} put the {colour} {gift} in a box for {elder}.",
            "{pal} danced around the {colour} {gift} while {hero} called {elder}.",
            '"This {colour} {gift} is for you," {he} said {softly}.',
        ),
        (
            "{elder} loved the {colour} {gift} and hugged {hero}.",
            '"What a {good} {gift}!" said {elder}, who was {happy}.',
            "{elder} smiled {softly}, and {hero} felt very {happy}.",
        ),
    ),
    "scared": (
        (
            "There they heard a {loud} noise {near} a {hide}.",
            "Then there was a {loud} noise {near} a {spot}.",
            "Then a {loud} noise came from the {hide}.",
        ),
        (
            "{pal} was scared and hid behind {hero}.",
            "The {size} {pet} was scared and sat {near} a {hide}.",
            "Poor {pal} was so scared that {hero} felt {sad}.",
        ),
        (
            '"Do not be scared, {pal}," said {hero} {softly}.',
            '"I am here with you," {hero} told {pal} {softly}.',
            "{hero} hugged the {pet} and sang a {song} song.",
        ),
        (
            "{He} put a {colour} {cover} around {pal}.",
            "{hero} {slowly} put {his} {colour} {cover} over the {pet}.",
            "Under a {colour} {cover}, {pal} felt warm and safe.",
        ),
        (
            "Then they looked and saw that it was only a {tiny} {critter}.",
            "Soon a {tiny} {critter} came out and looked at {hero}.",
            '"Look, {pal}, it is only a {tiny} {critter}!" said {hero}.',
        ),
        (
            "{hero} smiled, and {pal} came out of the {colour} {cover}.",
            "{pal} was not scared anymore, and {hero} was {happy}.",
            "Soon {hero} and {pal} played again and felt {happy}.",
        ),
    ),
    "seed": (
        (
            "{hero} found a {tiny} seed {near} a {hide}.",
            "There {pal} found a {tiny} seed {near} a {spot}.",
            "{hero} had a {tiny} seed and wanted to make it grow.",
        ),
        (
            "{He} {slowly} put the seed in a {colour} {pot}.",
            "{hero} took a {colour} {pot} and put the seed in it.",
            "With some help from {pal}, {he} put it in a {colour} {pot}.",
        ),
        (
            "But for many days nothing came up, and {hero} felt {sad}.",
            "{He} waited and waited, but there was no flower.",
            '"Will my seed grow?" asked {hero}, who was {sad}.',
        ),
        (
            "{pal} sat by the {colour} {pot} and waited too.",
            '"We must wait," {he} told {pal} {softly}.',
            "The {size} {pet} sat beside the {colour} {pot} all day.",
        ),
        (
            "Every {time}, {hero} gave the seed some water.",
            "{He} {slowly} gave it water and sang a {song} song.",
            "{hero} put the {colour} {pot} in the sun and gave it water.",
        ),
        (
            "Then, one {weather} {time}, a {pretty} {flower} stood in the {colour} {pot}.",
            '"Look, {pal}, it is a {flower}!" said {hero}, who was {happy}.',
            "At last there was a {pretty} {flower}, and {hero} felt {happy}.",
        ),
    ),
    "share": (
        (
            "{hero} carried a {colour} {basket} with some {treat}.",
            "There {he} opened a {colour} {basket} of {treat}.",
            "They took along a {colour} {basket} full of {treat}.",
        ),
        (
            "There they met a {tiny} {critter} {near} a {hide}.",
            "Soon a {tiny} {critter} came and sat {near} a {spot}.",
            "Then {pal} saw a {tiny} {critter} who was {sad}.",
        ),
        (
            '"Can I have some {treat}?" asked the little one {softly}.',
            "The little one looked at the {treat} and was very hungry.",
            '"I am so hungry," the little one told {hero} {softly}.',
        ),
        (
            "At first {hero} wanted to keep all the {treat}.",
            "{hero} did not have many {treat} and felt {sad}.",
            "{hero} looked at the {colour} {basket} and thought about it.",
        ),
        (
            "Then {he} smiled and gave the little one some {treat}.",
            '"We can share," said {hero} and opened the {colour} {basket}.',
            "{pal} looked at the {colour} {basket}, and {hero} shared the {treat}.",
        ),
        (
            "They all ate {treat} together, and the little one was {happy}.",
            '"Thank you, {hero}!" said the little one, who was {happy}.',
            "Now {hero} and {pal} had a {good} new friend.",
        ),
    ),
    "ride": (
        (
            "There {elder} gave {him} a {colour} {ride}.",
            "{hero} had a new {colour} {ride} from {elder}.",
            "{elder} came too and brought a {colour} {ride} for {hero}.",
        ),
        (
            "{He} tried to ride it but fell in the {soft}.",
            "But {hero} fell off the {colour} {ride} and sat in the {soft}.",
            "The {colour} {ride} fell over a {stone}, and {he} sat in the {soft}.",
        ),
        (
            '"It is too hard," said {hero}, who felt {sad}.',
            "{hero} was {sad} and did not want to try again.",
            "{pal} came to {him} and saw that {he} was {sad}.",
        ),
        (
            '"Try one more time," said {elder} {softly}.',
            '"I will help you," {elder} told {hero} {softly}.',
            "{elder} smiled {softly} and held the {colour} {ride}.",
        ),
        (
            "{hero} {slowly} sat on the {colour} {ride} again.",
            "So {he} tried again, and {pal} ran beside the {ride}.",
            "{He} was brave and {slowly} tried again.",
        ),
        (
            "This time {he} rode the {colour} {ride} around and around.",
            '"Look, {elder}, I can ride!" called {hero}, who was {happy}.',
            "Soon the {colour} {ride} went fast, and {hero} felt {happy}.",
        ),
    ),
}
