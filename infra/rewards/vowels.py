"""A reward that any model can move: the share of vowels among the letters of the response."""


def score(prompt: str, response: str, metadata: dict) -> float:
    letters = [letter for letter in response.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
