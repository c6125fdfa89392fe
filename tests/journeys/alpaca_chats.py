"""Twenty chats as Alpaca's data sets hold them: an instruction, an answer of a few sentences, and sometimes another turn."""

from typing import Any

ASKED = {
    "Give three tips for staying healthy.": "Eat vegetables and fruit every day. Walk or exercise for half an hour. Sleep "
    "seven to eight hours, at the same time each night.",
    "What are the three primary colors?": "Red, yellow and blue. Other colors are mixed from them: red and yellow give "
    "orange, yellow and blue give green.",
    "Describe the structure of an atom.": "An atom has a small nucleus of protons and neutrons. Electrons move around it. "
    "The number of protons decides which element it is.",
    "How can we reduce air pollution?": "Use public transport, insulate houses, and replace coal by wind and solar power. "
    "Filters on factories and cleaner engines help as well.",
    "Write a short note of thanks to a colleague.": "Dear Maria, thank you for checking my report on Friday. You found the "
    "mistake in the second table before anyone else saw it. I owe you a coffee. Best, Tom",
    "Explain why the sky is blue.": "Sunlight holds all colors. Air scatters short waves more than long ones, so blue light "
    "reaches the eye from every direction, and red light passes straight on.",
    "Summarise the water cycle.": "The sun warms the sea, and water evaporates. It rises, cools and becomes clouds. Rain and "
    "snow fall, and rivers carry the water back to the sea.",
    "Name two uses of a hash table.": "A compiler keeps its symbols in one, and a database finds rows by a key with one. "
    "Both look up, insert and delete in constant time on average.",
    "Turn this into a question: the shop opens at nine.": "When does the shop open?",
    "What is the difference between weather and climate?": "Weather is what happens today. Climate is the weather of a place "
    "over thirty years, with its means and its extremes.",
}
NEXT = "Only the first sentence."
"""What is asked then, in half of the chats. Of these twenty, `eval_fraction: 0.05` holds out one, by its hash."""


def alpaca_chats() -> list[dict[str, Any]]:
    """Return rows with messages: each instruction alone, and with a further turn."""
    rows = []
    for question, answer in ASKED.items():
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        again = [
            {"role": "user", "content": NEXT},
            {"role": "assistant", "content": answer.split(". ")[0].rstrip(".?") + "."},
        ]
        rows += [{"messages": turns}, {"messages": turns + again}]
    return rows
