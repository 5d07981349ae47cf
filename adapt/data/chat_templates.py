"""Templated questions of a chat written by the project: prompts without third-party text, for targets that answer."""

from __future__ import annotations

import random

_TOPICS = """
    photosynthesis; black holes; the water cycle; inflation; compound interest; vaccines; the immune system; plate tectonics; how a
    refrigerator works; gravity; electric motors; the French Revolution; the Silk Road; the Roman Empire; the moon landing; jazz; chess openings;
    machine learning; hash tables; binary search; public-key cryptography; the internet; DNS; recursion; databases; version control; solar panels;
    wind turbines; nuclear power; climate change; coral reefs; bees; whales; volcanoes; earthquakes; the human heart; sleep; memory;
    stress; yoga; running a marathon; growing tomatoes; baking bread; making coffee; fermentation; knife skills; budgeting; taxes; mortgages;
    job interviews; negotiation; public speaking; time management; learning a language; reading music; painting with watercolours; photography;
    camping; first aid; bicycle maintenance; house plants; recycling; democracy; the United Nations; supply and demand; game theory; statistics;
    probability; prime numbers; calculus; the Pythagorean theorem; Shakespeare; haiku; mythology; stoicism; the scientific method; telescopes;
    batteries; 3D printing; self-driving cars; robots; virtual reality; podcasts; video games; animation; fashion; architecture; bridges
"""
_THINGS = """
    a lighthouse keeper; a robot who learns to paint; two rival bakers; a lost dog; an old library; a dragon who is afraid of fire; a
    time traveller; the last tree; a detective with no memory; a village under the sea; a girl who talks to birds; a train that never stops; a
    clockmaker; a broken radio; the first day of school; a storm at sea; an astronaut's letter home; a haunted bookshop; a shy magician; a stolen recipe
"""
_PLACES = "Lisbon; Kyoto; Iceland; Morocco; Peru; Vienna; New Zealand; Cape Town; Vietnam; Scotland; Mexico City; Istanbul; Norway; Rome; Seoul; Patagonia"
_WHO = "a child; a beginner; a student; my grandmother; an engineer; a busy manager; a teacher; a teenager"
_MAILS = """
    asking for a day off; inviting colleagues to a birthday lunch; complaining about a late delivery; thanking a customer; declining a
    job offer; following up after an interview; asking for a refund; announcing a new feature; rescheduling a meeting; introducing a new team member
"""
_FORMS = (
    "Explain {topic} to {who}.", "What is the most important thing to know about {topic}?", "Give me five tips about {topic}.",
    "What are the advantages and disadvantages of {topic}?", "Write a short introduction to {topic}.", "List three common mistakes about {topic}.",
    "How would you teach {topic} in one hour?", "Summarise {topic} in three sentences.", "Write ten quiz questions about {topic}, with answers.",
    "What is the history of {topic}?", "Compare {topic} and {other}.", "Why does {topic} matter?", "Write a short poem about {topic}.",
    "Write a short story about {thing}.", "Write the first paragraph of a novel about {thing}.", "Write a dialogue between {thing} and {thing2}.",
    "Plan a three-day trip to {place}.", "What should I eat in {place}?", "Write a polite email {mail}.", "Write a short email {mail}, in a friendly tone.",
    "Make a table that compares {topic} with {other}.", "Give me a step-by-step guide to {topic}.", "What questions should I ask an expert on {topic}?",
    "Write a tweet about {topic}.", "I am interested in {topic}. Where should I start?", "Define {topic} and give an example.",
)  # fmt: skip
_FOLLOWING = (
    "Make it shorter.", "Can you give an example?", "Explain that more simply.", "What else should I know?", "Write it as a list.",
    "Are you sure? Explain why.", "Now for {who}.",
)  # fmt: skip
_GREETINGS = "Hello!; Hi, who are you?; Good morning. How are you?; Hello, what can you do?; Thanks for your help!"


def _choices(text: str) -> list[str]:
    return [" ".join(x.split()) for x in text.split(";")]


def generate_questions(rng: random.Random) -> list[str]:
    """What a user says in one chat, turn after turn: mostly one question, sometimes one about its answer."""
    if rng.random() < 0.02:
        return [rng.choice(_choices(_GREETINGS))]
    topics, things = rng.sample(_choices(_TOPICS), 2), rng.sample(_choices(_THINGS), 2)
    words = {
        "topic": topics[0], "other": topics[1], "thing": things[0], "thing2": things[1], "who": rng.choice(_choices(_WHO)),
        "place": rng.choice(_choices(_PLACES)), "mail": rng.choice(_choices(_MAILS)),
    }  # fmt: skip
    questions = [rng.choice(_FORMS).format(**words)]
    if rng.random() < 0.2:
        questions.append(rng.choice(_FOLLOWING).format(**words))
    return questions
