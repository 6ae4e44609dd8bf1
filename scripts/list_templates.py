"""Writes docs/reference/templates.md: the chat templates of TRL, rendered and labelled.

    python scripts/list_templates.py [--check]

Each template that the TRL package ships is given nine conversations, and what becomes of them is
compared with transformers' `apply_chat_template`. With `--check` nothing is written, and the exit
status is 1 if the page is not what it would be.
"""

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerFast

from isobatch.counting.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected, Turn
from isobatch.models.presets import MediaMarkup
from isobatch.packer.demo.dataset import demo_tokenizer_path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "templates.md"
HEAD = """# Chat templates

Made by `python scripts/list_templates.py` from the {number} templates that TRL {trl} ships,
compared with `apply_chat_template` of transformers {transformers}. A test makes it again.

Each template is given nine conversations: {kinds}.

- *Used*: conversations that are packed. The others are refused by the template itself, whose words
  are in the last column, or by the packer ("{left_out}"): transformers renders a text that has
  neither the call nor anything to learn it from.
- *Ids equal*: those of `apply_chat_template`, all of them.
- *Labels equal*: for a template with `{{% generation %}}`, the mask that
  `return_assistant_tokens_mask` gives. For one without: the text of each answer, its
  thought and its call have labels where they are written, and that of no other message; and where
  two renderings tell an answer's place (the conversation before it with the generation prompt, and
  the conversation up to its end), all of it has labels, and the prompt has none.

| template | `generation` | used | ids equal | labels equal | refused |
|---|---|--:|--:|--:|---|
"""
LEFT_OUT = "the template leaves out the call"
TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
TOOL = {
    "name": "look_up",
    "description": "Looks up.",
    "parameters": {
        "type": "object",
        "properties": {"of": {"type": "string", "description": "A word."}},
        "required": ["of"],
    },
}
CALL = {"name": "look_up", "arguments": {"of": "zebra", "n": 1}}

Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    """A question."""
    return {"role": "user", "content": text}


def answer(text: str | None, **more: Any) -> dict[str, Any]:
    """An answer, with other fields of its message."""
    return {"role": "assistant", "content": text, **more}


ROUNDS = [[user(f"Question{i}?"), answer(f"Answer{i}.")] for i in range(4)]
THOUGHTS = [[user(f"Question{i}?"), answer(f"Answer{i}.", reasoning_content=f"Thought{i}")]
            for i in range(3)]  # fmt: skip
CONVERSATIONS: dict[str, Chat] = {
    "one answer": ROUNDS[0],
    "several answers": [*ROUNDS[0], *ROUNDS[1], *ROUNDS[2]],
    "a system turn": [{"role": "system", "content": "Be brief."}, *ROUNDS[0], *ROUNDS[1]],
    "one thought": THOUGHTS[0],
    "several thoughts": [*THOUGHTS[0], *THOUGHTS[1], *THOUGHTS[2]],
    "thoughts in the text": [
        message if message["role"] == "user"
        else answer(f"<think>\nThought{i}\n</think>\n\nAnswer{i}.")
        for i, pair in enumerate(ROUNDS[:2]) for message in pair
    ],
    "a call of a tool": [
        user("Question0?"),
        answer("", tool_calls=[{"id": "call00001", "type": "function", "function": CALL}]),
        {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": "Found it"},
        answer("Answer0."),
        *ROUNDS[1],
    ],
    "the assistant first": [ROUNDS[3][1], *ROUNDS[0]],
    "two answers in a row": [*ROUNDS[0], answer("Answer1.")],
}  # fmt: skip
TOOLS = {"a call of a tool": [{"type": "function", "function": TOOL}]}


@dataclass
class Row:
    """What became of the conversations with one template."""

    name: str
    has_marks: bool
    used: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Refused by transformers too: kind -> what the template says."""
    wrong_refusals: dict[str, str] = field(default_factory=dict)
    """Refused by the packer alone, or by transformers alone."""
    other_ids: list[str] = field(default_factory=list)
    other_labels: list[str] = field(default_factory=list)


def templates() -> dict[str, str]:
    """The templates that TRL ships, by name."""
    spec = find_spec("trl")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        sys.exit("error: TRL is not installed")
    files = sorted(Path(folders[0], "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text("utf-8") for path in files}


@cache
def tokenizer_folder() -> Path:
    """The demo's tokenizer with tokens under the names that templates ask for."""
    folder = Path(tempfile.mkdtemp())
    (folder / "tokenizer.json").write_bytes((demo_tokenizer_path() / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    return folder


@cache
def reference() -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it."""
    tokenizer: PreTrainedTokenizerFast
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    return tokenizer


@dataclass(frozen=True)
class _Expected:
    """What transformers makes of a conversation."""

    source: str
    chat: Chat
    tools: Any

    def _apply(self, chat: Chat, **options: Any) -> Any:
        return reference().apply_chat_template(
            chat, tools=self.tools, chat_template=self.source, **options
        )

    def ids_or_error(self) -> tuple[list[int] | None, str]:
        """The ids, or None and what the template says."""
        try:
            return self._apply(self.chat, return_dict=False), ""
        except Exception as error:  # whatever a template raises
            return None, re.sub(r"\s+", " ", str(error))

    def with_text_of_calls(self) -> Self:
        """The same with arguments of calls as JSON text, which some templates want."""
        chat = [dict(message) for message in self.chat]
        for message in chat:
            if "tool_calls" in message:
                function = CALL | {"arguments": json.dumps(CALL["arguments"])}
                message["tool_calls"] = [message["tool_calls"][0] | {"function": function}]
        return replace(self, chat=chat)

    def mask_is(self, labelled: np.ndarray) -> bool:
        """Whether the labels are those of the marks; the first token has none."""
        found = self._apply(self.chat, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(found["assistant_masks"], bool)
        return bool((labelled[1:] == mask[1:]).all())

    def answers_are(self, labelled: np.ndarray) -> bool:
        """Whether all answers have labels, and what is no answer has none."""
        text = self._apply(self.chat, tokenize=False)
        encoded = reference()(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        letters = np.zeros(len(text), bool)
        for (start, end), has_label in zip(offsets, labelled, strict=True):
            letters[start:end] |= bool(has_label)
        known: list[tuple[int, int]] = []
        for i, message in enumerate(self.chat):
            place = self._place(i, text) if message["role"] == "assistant" else None
            if place is not None:
                known.append(place)
            for word in re.findall(
                "Question[0-9]|Answer[0-9]|Thought[0-9]|zebra|brief|Found", str(message)
            ):
                at = text.find(word)
                is_answer = message["role"] == "assistant"
                if at >= 0 and letters[at : at + len(word)].tolist() != [is_answer] * len(word):
                    return False
        wanted = np.array(
            [any(a < last and b > first for first, last in known) for a, b in offsets]
        )
        if len(known) < sum(message["role"] == "assistant" for message in self.chat):
            # what is near the known ones: the rest of the text may be of answers too
            near = [any(a < last and b > first - 4 for first, last in known) for a, b in offsets]
            wanted, labelled = wanted[near], labelled[near]
        return bool((labelled[1:] == wanted[1:]).all())

    def _place(self, i: int, text: str) -> tuple[int, int] | None:
        """Where the answer `i` is, if renderings of the conversation up to it tell."""
        try:
            before = self._apply(self.chat[:i], tokenize=False, add_generation_prompt=True)
            after = self._apply(self.chat[: i + 1], tokenize=False)
        except Exception:  # nothing before it, or whatever a template raises
            return None
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        return None


def compare(name: str, source: str) -> Row:
    """Give a template all conversations."""
    row = Row(name, bool(re.search(r"\{%-?\s*generation\s*-?%\}", source)))
    today = date.today().isoformat()  # as transformers writes it
    tokenizer = ChatTokenizer.load(
        tokenizer_folder(), MediaMarkup(token="<image>"), chat_template=source, template_date=today
    )
    takes_text = _shows(source, "Question")
    batch = [_turns(chat, TOOLS.get(kind)) for kind, chat in CONVERSATIONS.items()]
    for kind, encoded in zip(CONVERSATIONS, tokenizer.encode_batch(batch), strict=True):
        chat = CONVERSATIONS[kind]
        if not takes_text:
            chat = [message | {"content": _part(message["content"])} for message in chat]
        _compare(row, kind, encoded, _Expected(source, chat, TOOLS.get(kind)))
    return row


def _compare(row: Row, kind: str, encoded: EncodedText | TextRejected, expected: _Expected) -> None:
    ids, said = expected.ids_or_error()
    if ids is None and kind in TOOLS:
        expected = expected.with_text_of_calls()
        ids, _ = expected.ids_or_error()
    if isinstance(encoded, TextRejected):
        if ids is None:
            row.refused[kind] = said
        elif "leaves out" in encoded.detail and "zebra" not in reference().decode(ids):
            row.refused[kind] = LEFT_OUT
        else:
            row.wrong_refusals[kind] = encoded.detail
        return
    if ids is None:
        row.wrong_refusals[kind] = f"transformers: {said}"
        return
    row.used.append(kind)
    if encoded.input_ids.tolist() != ids:
        row.other_ids.append(kind)
    elif not (expected.mask_is if row.has_marks else expected.answers_are)(_labelled(encoded)):
        row.other_labels.append(kind)


def _labelled(encoded: EncodedText) -> np.ndarray:
    """Which tokens have a label."""
    labelled = np.zeros(len(encoded.input_ids), bool)
    for start, end in encoded.loss_spans:
        labelled[start:end] = True
    return labelled


def _shows(source: str, text: str) -> bool:
    """Whether a template takes texts that are no parts."""
    try:
        shown = reference().apply_chat_template([user(text)], chat_template=source, tokenize=False)
    except Exception:  # whatever a template raises
        return False
    return str(shown).count(text) == 1


def _part(text: str | None) -> Any:
    return text if text is None else [{"type": "text", "text": text}]


def _turns(chat: Chat, tools: Any) -> list[Turn]:
    turns = []
    for i, message in enumerate(chat):
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        if tools and i == 0:
            more["tools"] = tools
        text = message["content"] or ""
        turns.append(Turn(message["role"], text, json.dumps(more) if more else ""))
    return turns


# --- the page ---


def rows() -> list[Row]:
    """All templates of the TRL that is installed."""
    return [compare(name, source) for name, source in templates().items()]


def make_page(found: list[Row]) -> str:
    """The page of what was found."""
    kinds = list(CONVERSATIONS)
    head = HEAD.format(
        number=len(found),
        trl=version("trl"),
        transformers=version("transformers"),
        kinds=f"{', '.join(kinds[:-1])}, and {kinds[-1]}",
        left_out=LEFT_OUT,
    )
    first, table = head.split("\n\n| template", 1)
    wrapped = "\n\n".join(_wrapped(paragraph) for paragraph in first.split("\n\n"))
    return f"{wrapped}\n\n| template{table}" + "".join(map(_line, found))


def _wrapped(paragraph: str) -> str:
    items = paragraph.split("\n- ") if paragraph.startswith("- ") else [paragraph]
    indents = ["" if item.startswith(("- ", "#")) or len(items) == 1 else "- " for item in items]
    return "\n".join(
        fill(mark + " ".join(item.split()), 100, subsequent_indent="  " * (len(items) > 1))
        for mark, item in zip(indents, items, strict=True)
    )


def _line(row: Row) -> str:
    reasons: dict[str, list[str]] = {}
    for kind, said in (row.refused | row.wrong_refusals).items():
        reasons.setdefault(said.strip().replace("|", "\\|"), []).append(kind)
    why = "; ".join(f"{', '.join(kinds)}: {said}" for said, kinds in reasons.items())
    ids = len(row.used) - len(row.other_ids)
    labels = ids - len(row.other_labels)
    marks = "yes" if row.has_marks else ""
    return f"| `{row.name}` | {marks} | {len(row.used)} | {ids} | {labels} | {why} |\n"


def main() -> int:
    """Write or check the page."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    text = make_page(rows())
    if args.check:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/list_templates.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
