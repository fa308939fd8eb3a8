"""Greetings, thanks, who are you; and a polite answer to what the model cannot know."""

import random

from training.example import Example, ask
from training.phrasing import vary
from training.words import CITIES, COUNTRIES, NAMES, WORDS, a_value, a_word

IDENTITY = "I am Quire's embedded model, a very small model for tests and first steps."
ABILITIES = (
    "I can answer questions about Quire, add and subtract, spell, count, sort and reverse short words, "
    "fill a small JSON form, call a tool and tell a short story."
)
UNKNOWN = "I do not know that. I am a small model that knows Quire and a few small tasks."

TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello.", "Hi.", "Hey.", "Hello there.", "Hi there.", "Good morning.", "Good evening.", "Good day.", "Greetings."),
     "Hello! How can I help you?"),
    (("How are you?", "How are you doing?", "How is it going?", "Are you well?", "How do you do?"),
     "I am fine, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me who you are.", "Introduce yourself.",
      "Are you a model?", "Tell me about yourself.", "Which model are you?", "What model are you?"), IDENTITY),
    (("What can you do?", "How can you help me?", "What are your skills?", "Help.", "Help me.", "What are you able to do?",
      "What can I do with you?", "What tasks can you do?", "Show me what you can do."), ABILITIES),
    (("Thanks.", "Thank you.", "Thank you very much.", "Thanks a lot.", "Many thanks.", "Great, thanks."), "You are welcome!"),
    (("Bye.", "Goodbye.", "See you.", "See you later.", "Good night.", "Bye bye."), "Goodbye!"),
    (("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?"), "No, I am a very small language model."),
    (("Who made you?", "Who built you?", "Who trained you?", "Where do you come from?"),
     "I was trained by a script in the Quire repository."),
    (("Ok.", "Okay.", "Good.", "Great.", "Nice.", "Cool.", "I see.", "Well done.", "Very good."), "What else can I do for you?"),
    (("Say hello.", "Say hi.", "Greet me."), "Hello!"),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."), "I know no jokes, but I can tell you a short story."),
    (("Yes.", "No.", "Maybe.", "Why?", "Really?"), "Please ask me a question about Quire, or give me a small task."),
)  # fmt: skip

UNKNOWABLE = (
    "Who is the president of {country}?", "What is the capital of {country}?", "How many people live in {city}?",
    "Who wrote {word}?", "What is the weather in {city}?", "What time is it in {city}?", "Translate {word} into French.",
    "What is the price of {word}?", "Who is {name}?", "Where is {city}?", "How old is {name}?", "Who invented the {word}?",
    "What is the best {word}?", "Why do people like {word}?", "Write a poem about {word}.", "How do I cook {word}?",
    "What is a {word}?", "Where can I buy a {word}?", "How far is {city} from {country}?", "What is the meaning of {word}?",
    "Who won the match in {city}?", "Recommend a book about {word}.", "What is the history of {country}?",
    "Explain {word} to me.", "Tell me about {city}.", "What do you think about {word}?", "When was {name} born?",
    "What language do they speak in {country}?", "What colour is a {word}?", "Do you like {word}?", "Is {city} a big city?",
    "What is {word}?", "Tell me about {word}.", "Can you drive to {city}?", "What is the news from {city}?",
)  # fmt: skip


def talk(rng: random.Random) -> Example:
    questions, answer = rng.choice(TALK)
    question = rng.choice(questions)
    text = vary(rng, question, polite=False)
    return ask("talk", text.lower(), text, answer)


def unknown(rng: random.Random) -> Example:
    word = rng.choice(WORDS) if rng.random() < 0.8 else a_word(rng, 4, 8)
    values = {
        "country": a_value(rng, COUNTRIES),
        "city": a_value(rng, CITIES),
        "name": a_value(rng, NAMES),
        "word": word,
    }
    template = rng.choice(UNKNOWABLE)
    text = vary(rng, template, polite=False).format(**values)
    return ask("unknown", template.format(**values), text, UNKNOWN)
