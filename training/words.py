"""Raw material of the tasks: words, names, cities, and a generator of words that nobody wrote down."""

import random

WORDS: tuple[str, ...] = tuple(
    """
    cat dog fox owl hen pig cow bee ant bat rat elk emu cod eel ape cub kid jam pie tea egg ham nut fig pea oat rye
    cup pan pot mug jar lid box bag hat cap tie sock shoe boot coat belt glove scarf ring gem gold iron rock sand mud
    sea bay lake pond river hill moor peak cave tree leaf root seed rose lily fern moss grass weed vine plum pear lemon
    lime apple peach grape mango melon berry cherry banana orange papaya carrot potato tomato onion garlic pepper bean
    corn rice bread toast cake candy sugar honey butter cheese milk cream juice water soup salad pizza pasta noodle
    bird duck goose swan eagle hawk robin crow raven parrot finch wolf bear lion tiger zebra horse pony donkey sheep
    goat camel llama rabbit mouse otter beaver badger monkey panda koala whale shark seal crab shrimp squid snail
    spider beetle moth fly wasp cricket frog toad snake lizard turtle house barn shed tent hut castle tower bridge
    road street lane wall door window roof floor chair bench stool desk lamp clock bell drum flute piano violin guitar
    horn harp song dance poem novel pen pencil ruler eraser paper brush paint chalk glue tape rope thread needle
    button zipper pocket basket bucket ladder hammer nail saw drill wrench screw shovel rake broom mop sponge soap towel
    pillow blanket bed sofa rug carpet mirror candle match stove oven fridge kettle spoon fork knife plate bowl glass
    bottle ball kite doll puzzle cards dice swing slide bike car bus train plane boat ship ferry truck van taxi rocket
    wheel engine motor sun moon star planet comet cloud rain snow wind storm fog frost ice fire smoke ash dust light
    spring summer autumn winter hello world strawberry mountain elephant penguin giraffe kangaroo umbrella sandwich
    blueberry pumpkin cucumber broccoli chocolate cinnamon vanilla dolphin hamster squirrel butterfly dragonfly ladybug
    mississippi parallel balloon coffee giggle pebble bubble puppy kitten yellow purple green brown black white silver
    happy funny jolly sunny windy muddy fuzzy quick brave quiet gentle wise shiny smart proud
    """.split()
)

NAMES: tuple[str, ...] = tuple(
    """
    Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Mia Noah Olga Paul Rosa Simon Tina Viktor Wanda Yara
    Zoe Adam Bella Carl Dora Erik Fiona George Hanna Ivan Julia Kevin Laura Mila Nina Oscar Petra Quinn Rita Sam Tom Uma
    Vera Walt Xenia Yusuf Zara Alice Bob Carol Dan Eve Frank Grace Henry Iris Jack Kate Liam Mary Nora Otto Pia Ralf
    Sara Theo Ute Vince Willa Amir Bruno Chloe Diego Elena Fatima Gita Hiro Ingrid Jamal Kenji Lena Marco Nadia Omar
    Priya Ravi Sofia Tariq Ursula Wei Ximena Yuki Zain Aisha Boris Celia Dmitri Esther Farah Gustav Heidi Igor Jana Kofi
    """.split()
)

CITIES: tuple[str, ...] = tuple(
    """
    Oslo Paris London Berlin Rome Madrid Vienna Prague Warsaw Athens Lisbon Dublin Helsinki Bern Zurich Geneva Lyon
    Milan Turin Naples Venice Cairo Lagos Nairobi Tunis Rabat Accra Dakar Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi
    Mumbai Dhaka Hanoi Manila Jakarta Sydney Perth Auckland Toronto Montreal Boston Chicago Denver Seattle Austin Dallas
    Miami Lima Quito Bogota Havana Santiago Brasilia Riga Vilnius Tallinn Kyiv Minsk Sofia Zagreb Porto Seville
    Valencia Munich Hamburg Cologne Bonn Dresden Leipzig Graz Linz Basel Ghent Bruges Utrecht Malmo Bergen Turku Tampere
    """.split()
)

COUNTRIES: tuple[str, ...] = tuple(
    """
    Norway France Germany Italy Spain Austria Poland Greece Portugal Ireland Finland Sweden Denmark Egypt Kenya Ghana
    Japan China India Vietnam Canada Mexico Peru Chile Brazil Cuba Turkey Iceland Morocco Nepal
    """.split()
)

CONSONANTS = "bcdfghjklmnprstvwxz"
VOWELS = "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def random_word(rng: random.Random, low: int, high: int) -> str:
    """A word that can be pronounced most of the time, so that tasks on letters cannot be learned by heart."""
    length = rng.randint(low, high)
    if rng.random() < 0.3:
        return "".join(rng.choices(LETTERS, k=length))
    word = ""
    use_vowel = rng.random() < 0.3
    while len(word) < length:
        word += rng.choice(VOWELS if use_vowel else CONSONANTS)
        if rng.random() < 0.12:
            word += word[-1]
        use_vowel = not use_vowel
    return word[:length]


def a_word(rng: random.Random, low: int, high: int) -> str:
    """A word of `low` to `high` letters: a real one or an invented one."""
    while rng.random() < 0.45:
        word = rng.choice(WORDS)
        if low <= len(word) <= high:
            return word
    return random_word(rng, low, high)


def a_value(rng: random.Random, listed: tuple[str, ...]) -> str:
    """A proper name from a list or an invented one, so that copying is learned and not the list."""
    return rng.choice(listed) if rng.random() < 0.6 else random_word(rng, 3, 8).capitalize()
