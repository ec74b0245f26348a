"""How a prompt becomes the token ids that the policy sees. From then on it is ids; no stage encodes its text again."""

import hashlib
import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from schemas.config import Config, ConfigError, PromptsSection
from schemas.manifest import digest_of
from schemas.prompts import Rejected
from tasks.models.loading import load_tokenizer
from tasks.models.samples import resolve
from tasks.prompt_pool import Messages, PoolPrompt, PromptError
from tasks.stage import StageError

_TOKENIZER_FILE = re.compile(r"tokenizer|chat_template|special_tokens|added_tokens|vocab|merges|spiece|sentencepiece")
_VOCABULARY_FILE = re.compile(r"tokenizer\.(json|model)|vocab|spiece|sentencepiece")


def encode(tokenizer: Any, prompt: PoolPrompt, section: PromptsSection, source: str) -> list[int]:
    """The ids that the policy sees of a prompt; none of an empty chat.

    Raises PromptError where the chat template refuses it.
    """
    messages = as_messages(prompt.prompt, section)
    if messages is None:
        if section.system is not None:
            raise PromptError(
                f"{source}, row {prompt.row} is a text, and prompts.system can only be put before a chat; set "
                f"prompts.chat = true, or leave prompts.system out"
            )
        return encode_text(tokenizer, prompt.text)
    if not prompt.prompt:
        return []
    if tokenizer.chat_template is None:
        raise PromptError(
            f"{source}, row {prompt.row} is a chat, but the policy's tokenizer has no chat template; give the model "
            f"folder one (chat_template.jinja), or use `prompt` texts with prompts.chat = false"
        )
    try:
        return encode_chat(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author, and raises what it likes
        raise PromptError(
            f"{source}, row {prompt.row}: the policy's chat template refused the messages "
            f"({type(error).__name__}: {error}); correct the roles and their order"
        ) from error


def longest_prompt(config: Config) -> int:
    """Tokens that a prompt may have: `prompts.max_prompt_tokens`, and one less than the context in any case."""
    room = context_of(config) - 1
    most = config.prompts.max_prompt_tokens
    return room if most is None else min(room, most)


def rejection(prompt: PoolPrompt, tokens: list[int], longest: int) -> Rejected | None:
    """Why a prompt is not rolled out, or None."""
    if not prompt.prompt or not tokens:
        return Rejected.EMPTY
    return Rejected.PROMPT_TOO_LONG if len(tokens) > longest else None


def context_of(config: Config) -> int:
    """Tokens that a prompt and its response may have together: `rollout.max_model_len`, else the model's own.

    Raises StageError where neither is known.
    """
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    if (context := own_context(resolve(config.models.policy))) is None:
        raise StageError(f"the model {config.models.policy} names no context length; set rollout.max_model_len")
    return context


def own_context(folder: Path) -> int | None:
    """The positions that a model was made for; None where it names none."""
    context = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", None)
    return None if context is None else int(context)


def require_same_ids(config: Config) -> None:
    """Raises ConfigError where the reference or the critic would read a token id of the policy's as another token.

    Such a model fails nowhere; its log-probs and values are those of another text. Ids that it has beyond the policy's
    do no harm. Of a folder without a tokenizer only the number of its embeddings is known.
    """
    of_roles = {"reference": config.models.reference, "critic": config.models.critic_folder}
    others = {role: path for role, path in of_roles.items() if path not in (None, config.models.policy)}
    ids = load_tokenizer(resolve(config.models.policy)).get_vocab() if others else {}
    for role, path in others.items():
        folder = resolve(path)
        has_tokenizer = any(_VOCABULARY_FILE.search(file.name) for file in folder.iterdir())
        tokens = {at: token for token, at in load_tokenizer(folder).get_vocab().items()} if has_tokenizer else {}
        known = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        for token, at in sorted(ids.items(), key=lambda item: item[1]):
            if at >= known or tokens.get(at, token) != token:
                there = "beyond its embeddings" if at >= known else f"{tokens[at]!r} there"
                raise ConfigError(
                    f"models.{role} = {path} has another vocabulary than the policy {config.models.policy}: id {at} is "
                    f"{token!r} to the policy, and {there}. It would score another text; use a model on the policy's "
                    f"tokenizer"
                )


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the files of a model folder that decide how texts become ids, the chat template among them."""
    files = sorted(path for path in folder.iterdir() if _TOKENIZER_FILE.search(path.name) and path.is_file())
    return digest_of([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])


def settings_digest(folder: Path) -> str:
    """SHA-256 over what a model folder says beside its weights: config.json (a reward model's `score_mean` is in it)
    and the tokenizer's files. Raises StageError where there is no config.json."""
    if not (folder / "config.json").is_file():
        raise StageError(f"no config.json in {folder}: expected a model folder in Hugging Face layout")
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return digest_of([config, tokenizer_digest(folder)])


def as_messages(prompt: str | Messages, section: PromptsSection) -> Messages | None:
    """The chat that the policy sees, or None where it sees the text as it is.

    `prompts.system` comes first, unless the chat brings a system message of its own.
    """
    if isinstance(prompt, str):
        if not section.chat:
            return None
        prompt = [{"role": "user", "content": prompt}]
    if section.system is not None and not (prompt and prompt[0]["role"] == "system"):
        return [{"role": "system", "content": section.system}, *prompt]
    return prompt


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text with the special tokens that the tokenizer itself adds, and never two BOS."""
    return _one_bos(tokenizer, tokenizer.encode(text))


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """The ids of a given response as a policy samples one that it ends by itself: no BOS, and EOS last."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def encode_chat(tokenizer: Any, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
    """The ids of a chat under the tokenizer's template.

    They start with exactly one BOS where the template writes one or the tokenizer adds one, with both or either.
    Raises whatever the template raises.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    return _one_bos(tokenizer, [tokenizer.bos_token_id, *tokens] if adds_bos else tokens)


def _one_bos(tokenizer: Any, tokens: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return tokens
    first = next((position for position, token in enumerate(tokens) if token != bos), len(tokens))
    return tokens[max(first - 1, 0) :]
