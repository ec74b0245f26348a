"""A reward for the demo: how positive a response sounds to the VADER lexicon, from -1 to 1."""

from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_analyzer = SentimentIntensityAnalyzer()


def score(prompt: str | list[dict[str, str]], response: str, metadata: dict[str, Any]) -> float:
    """VADER's compound score of the response (Hutto and Gilbert, 2014)."""
    return _analyzer.polarity_scores(response)["compound"]
