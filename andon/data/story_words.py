"""The words and sentences of the built-in stories; `stories.py` says how they are put together.

Each value of a slot is one word, each sentence ends with its only full stop, and no value needs "an".
"""

from __future__ import annotations

GIRLS = ("Anna", "Ella", "Emma", "Lily", "Mia", "Nora", "Ruby", "Zoe")
BOYS = ("Adam", "Ben", "Finn", "Jack", "Leo", "Noah", "Sam", "Tom")

# Words that follow from the hero: for a boy, for a girl.
AGREEING = {
    "he": ("he", "she"),
    "He": ("He", "She"),
    "him": ("him", "her"),
    "his": ("his", "her"),
    "child": ("boy", "girl"),
}

# Chosen once in a story that mentions them.
CAST = {
    "hero": GIRLS + BOYS,
    "pal": ("Bo", "Button", "Coco", "Dot", "Fizz", "Hazel", "Nibs", "Pepper", "Pip", "Waffle"),
    "pet": ("cat", "dog", "duck", "fox", "goat", "lamb", "pony", "rabbit"),
    "place": ("field", "forest", "garden", "meadow", "orchard", "park", "valley", "village"),
    "colour": ("blue", "brown", "green", "pink", "purple", "red", "white", "yellow"),
    "elder": ("Dad", "Grandma", "Grandpa", "Mom"),
    "toy": ("ball", "bell", "boat", "car", "drum", "flute", "kite", "train"),
    "cover": ("blanket", "cape", "coat", "scarf", "tent", "umbrella"),
    "gift": ("bowl", "card", "hat", "lamp", "mask", "scarf"),
    "ride": ("bike", "cart", "scooter", "sled"),
    "flower": ("bean", "daisy", "melon", "pumpkin", "rose", "tulip"),
    "pot": ("bowl", "box", "bucket", "cup", "pot", "tub"),
    "basket": ("bag", "basket", "bowl", "box", "bucket"),
    "treat": ("berries", "cherries", "cookies", "grapes", "nuts", "pears", "plums"),
    "guest": ("bird", "frog", "hen", "mouse", "turtle", "squirrel"),
}

# Chosen anew wherever they stand.
LOCAL = {
    "weather": ("bright", "calm", "cool", "mild", "quiet", "sunny", "warm", "windy"),
    "time": ("afternoon", "day", "evening", "morning"),
    "kind": ("brave", "cheerful", "clever", "gentle", "kind", "quiet", "smart", "sweet"),
    "size": ("funny", "gentle", "little", "playful", "sleepy", "small", "tiny", "young"),
    "happy": ("cheerful", "glad", "happy", "joyful", "proud", "thankful"),
    "sad": ("gloomy", "sad", "unhappy", "upset", "worried"),
    "softly": ("gently", "kindly", "quietly", "softly", "sweetly", "warmly"),
    "slowly": ("calmly", "carefully", "gently", "patiently", "slowly"),
    "near": ("behind", "beside", "near", "under"),
    "hide": ("bush", "fence", "hedge", "log", "rock", "tree"),
    "spot": ("barrel", "bench", "bridge", "gate", "wagon"),
    "tiny": ("little", "small", "tiny", "young"),
    "critter": ("bird", "frog", "hen", "mouse", "turtle", "squirrel"),
    "glue": ("glue", "rope", "string", "tape", "wire", "wood"),
    "soft": ("grass", "hay", "leaves", "mud", "sand", "straw"),
    "stone": ("log", "rock", "root", "stick", "stone"),
    "dark": ("cloudy", "dark", "gray", "stormy"),
    "loud": ("deep", "loud", "strange", "sudden"),
    "good": ("clever", "good", "great", "lovely", "wonderful"),
    "song": ("cheerful", "funny", "happy", "little", "silly"),
    "pretty": ("bright", "lovely", "pretty", "tall", "wonderful"),
    "look": ("dig", "look", "search", "sniff"),
    "food": ("bread", "cake", "milk", "pie", "rice", "soup", "toast"),
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
        "It was a {good} {time} for {hero} and {pal} the {pet}.",
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
            "Suddenly {hero} could not find the {colour} {toy}.",
        ),
        (
            "{He} looked {near} a {hide} and {near} a {spot}, but it was not there.",
            "{hero} looked {near} every {hide}, but there was no {toy}.",
            'They searched {near} a {hide}, and {hero} called, "Where is my {toy}?" again and again.',
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
            "Then {he} tripped over a {stone}, and the {colour} {toy} broke.",
            "All at once, the {colour} {toy} fell down and broke.",
        ),
        (
            "{hero} felt {sad}, and {pal} sat {softly} by {his} side.",
            "{He} felt so {sad} that {he} almost cried.",
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
            "Soon the sky turned {dark}, and rain began to fall.",
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
            "Then {he} remembered the {colour} {cover} in {his} bag.",
            "Luckily, {hero} had brought a {colour} {cover} from home.",
        ),
        (
            "{hero} held the {colour} {cover} over {pal} and waited.",
            "They sat {near} a {hide} with the {colour} {cover} over them.",
            "{hero} and {pal} sat close together under the {colour} {cover}.",
        ),
        (
            "They sang a {song} song and listened to the rain.",
            "{hero} sang a {song} song to {pal} until the rain stopped.",
            "{He} told {pal} a {song} story about a {critter} in the rain.",
        ),
        (
            "Then the sun came out, and a {pretty} rainbow stood over the {place}.",
            "At last the sun came back to the {place}, and they felt {happy}.",
            "Soon {hero} and {pal} were jumping in the puddles of the {place}.",
        ),
    ),
    "gift": (
        (
            "It was the birthday of {elder}, and {hero} wanted to give something.",
            "{hero} wanted to find a gift for {elder}.",
            "{He} thought about {elder}, who had a birthday.",
        ),
        (
            "But {he} had no money, and that made {him} {sad}.",
            "{He} thought and thought and felt {sad}.",
            '"What can I give to {elder}?" {hero} asked {pal} {softly}.',
        ),
        (
            "Then {pal} found some {glue}, and {hero} had a {good} idea.",
            "The {size} {pet} came with some {glue}, which was a {good} idea.",
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
            "Suddenly there was a {loud} noise {near} a {spot}.",
            "Then a {loud} noise came from the {hide}.",
        ),
        (
            "{pal} was scared and hid behind {hero}.",
            "The {size} {pet} began to shake and would not move.",
            "Poor {pal} was so scared that {hero} felt {sad}.",
        ),
        (
            '"Do not be afraid, {pal}," said {hero} {softly}.',
            '"I am here with you," {hero} told {pal} {softly}.',
            "{hero} hugged the {pet} and sang a {song} song.",
        ),
        (
            "{He} put a {colour} {cover} around {pal}.",
            "{hero} {slowly} put {his} {colour} {cover} over the {pet}.",
            "Under the {colour} {cover}, {pal} felt warm and safe.",
        ),
        (
            "Then they looked and saw that it was only a {tiny} {critter}.",
            "Soon a {tiny} {critter} came out and looked at {hero}.",
            '"Look, {pal}, it is only a {tiny} {critter}!" said {hero}.',
        ),
        (
            "{hero} laughed, and {pal} jumped out of the {colour} {cover}.",
            "{pal} was not scared anymore, and {hero} was {happy}.",
            "They all played in the {place} and felt {happy}.",
        ),
    ),
    "seed": (
        (
            "{hero} found a {flower} seed {near} a {hide}.",
            "There {pal} found a {flower} seed {near} a {spot}.",
            "{elder} gave {him} a {flower} seed to grow.",
        ),
        (
            "{He} {slowly} put the seed in a {colour} {pot}.",
            "{hero} took a {colour} {pot} and put the seed inside.",
            "With some help from {pal}, {he} filled a {colour} {pot}.",
        ),
        (
            "But for many days nothing came up, and {hero} felt {sad}.",
            "{He} waited and waited, but there was no {flower}.",
            '"Will my {flower} ever grow?" asked {hero}, who was {sad}.',
        ),
        (
            "{pal} sat by the {colour} {pot} and waited too.",
            '"We must wait," {he} told {pal} {softly}.',
            "The {size} {pet} stayed beside the {colour} {pot} all day.",
        ),
        (
            "Every {time}, {hero} gave the seed some water.",
            "{He} {slowly} gave it water and sang a {song} song.",
            "{hero} put the {colour} {pot} in the sun and gave it water.",
        ),
        (
            "Then, one {weather} {time}, a {pretty} {flower} stood in the {colour} {pot}.",
            '"Look, {pal}, my {flower} is here!" said {hero}, who was {happy}.',
            "At last there was a {pretty} {flower}, and {hero} felt {happy}.",
        ),
    ),
    "share": (
        (
            "{hero} carried a {colour} {basket} full of {treat}.",
            "{He} had some {treat} in a {colour} {basket}.",
            "They took along a {colour} {basket} with {treat} from {elder}.",
        ),
        (
            "There they met a {tiny} {guest} {near} a {hide}.",
            "Soon a {tiny} {guest} came out from {near} a {spot}.",
            "Then {pal} saw a {tiny} {guest} who was {sad}.",
        ),
        (
            '"May I have some {treat}?" asked the {guest} {softly}.',
            "The {guest} looked at the {treat} and was very hungry.",
            '"I am so hungry," the {guest} told {hero} {softly}.',
        ),
        (
            "At first {hero} wanted to keep all the {treat}.",
            "{hero} did not have many {treat} and felt {sad}.",
            "{He} looked at the {colour} {basket} and thought about it.",
        ),
        (
            "Then {he} smiled and gave the {guest} some {treat}.",
            '"We can share," said {hero} and opened the {colour} {basket}.',
            "{pal} gave the {colour} {basket} a push, and {hero} shared the {treat}.",
        ),
        (
            "They all ate {treat} together, and the {guest} was {happy}.",
            '"Thank you, {hero}!" said the {guest}, who was {happy}.',
            "Now {hero} and {pal} had a new friend, the {guest}.",
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
            "The {colour} {ride} hit a {stone}, and {he} fell in the {soft}.",
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
            "This time {he} rode the {colour} {ride} around the {place}.",
            '"Look, {elder}, I can ride!" called {hero}, who was {happy}.',
            "Soon the {colour} {ride} went fast, and {hero} felt {happy}.",
        ),
    ),
}
