"""Encodes a chat by the template that a tokenizer brings along, as transformers does."""

import functools
import json
import re
import time

from prope.data.tokenizer import FIELD, JsonTokenizer, Tokenizer, read_beside
from prope.errors import first_line, usage_error
from prope.runtime.files import as_path, tokenizer_file


def encode_chat(name: str, tokenizer: Tokenizer, turns: list[str]) -> list[int]:
    """Encodes turns, the user's and the model's in turn, up to where the model's next begins.

    The template is chat_template.jinja beside the tokenizer.json, or in tokenizer_config.json; as
    it comes from elsewhere, it runs in a sandbox. Raises UsageError where there is none, or it
    fails.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        template, values = read_template(name, tokenizer)
        # {% generation %} marks what a model is trained on, and writes nothing.
        template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        text = environment.from_string(template).render(
            {
                role: token["content"] if isinstance(token, dict) else token  # of older files
                for role, token in values.items()
                if token and role.endswith("_token")
            },
            messages=[
                {"role": ("user", "assistant")[i % 2], "content": turn}
                for i, turn in enumerate(turns)
            ],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            raise_exception=_raise,
            strftime_now=time.strftime,
        )
    except Exception as error:  # a template may raise anything
        problem = f"has no chat template that works ({first_line(error)})"
        remedy = "leave out --chat, which is for models made for chats"
        raise usage_error(FIELD, name, problem, remedy) from None
    return tokenizer.encode(text.encode(), has_markup=True).tolist()


def read_template(name: str, tokenizer: Tokenizer) -> tuple[str, dict]:
    """Returns the chat template of a tokenizer, and the fields of tokenizer_config.json.

    Raises ValueError where there is none.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        raise ValueError("there is no tokenizer.json")
    file = tokenizer_file(as_path(FIELD, name))
    values = read_beside(file, "tokenizer_config.json")
    beside = file.with_name("chat_template.jinja")
    template = beside.read_text() if beside.is_file() else values.get("chat_template")
    if not isinstance(template, str):
        raise ValueError("there is no chat_template")
    return template, values


def _raise(message: str):
    raise ValueError(message)
