"""The protocol: what a client may ask, as OpenAI's API names it, and the errors that it gets.

Fields that the API has and this server does not serve are refused where they ask for something, and taken where they do
not, since clients send them with their neutral values. Unknown fields are ignored, as most servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_CHOICES = 128
MOST_ALTERNATIVES = 20
MOST_STOPS = 16
LONGEST_STOP = 1024
MOST_STOP_TOKENS = 1024
T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list, of which the first wrong item is told. An error for each of a million wrong items would take minutes."""


class ApiError(Exception):
    """An error as the API tells it: ``status`` of HTTP, a message, and what the client may look at."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """A field that is null has its default: the API lets clients say so."""
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


class StreamOptions(Body):
    include_usage: bool = False


class SampledBody(Body):
    """What chats and completions have in common. The last six are additions to the API, which others have too."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Several[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    user: str | None = None
    cache_salt: str = Field("", max_length=512)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    ttl: float | None = Field(None, ge=0, lt=2**31, allow_inf_nan=False)
    ignore_eos: bool = False
    stop_token_ids: Several[int] | None = Field(None, max_length=MOST_STOP_TOKENS)

    @model_validator(mode="after")
    def _served(self) -> SampledBody:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not served by this server: leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true alone")
        if not all(0 < len(stop) <= LONGEST_STOP for stop in self.stops) or len(self.stops) > MOST_STOPS:
            raise ValueError(f"stop has at most {MOST_STOPS} strings, of 1 to {LONGEST_STOP} characters")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionAsked(SampledBody):
    """The body of ``/v1/completions``."""

    prompt: str | Several[str] | Several[int] | Several[Several[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _plain(self) -> CompletionAsked:
        if self.suffix:
            raise ValueError("suffix is not served by this server: leave it out")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not served by this server: leave it out, and ask for n choices")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo goes without logprobs: those of the prompt are not computed")
        if not self.prompt or not (isinstance(self.prompt[0], int) or all(self.prompt)):
            raise ValueError("prompt: it has at least one token")
        return self

    @property
    def most_tokens(self) -> int:
        return self.max_tokens


class Url(Body):
    url: str


class ContentPart(Body):
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: Url | None = None

    @model_validator(mode="after")
    def _whole(self) -> ContentPart:
        if self.type == "image_url" and self.image_url is None:
            raise ValueError("a part of type image_url has an image_url")
        return self


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # a template may know more, such as a name

    role: str = Field(max_length=64)
    content: str | Several[ContentPart] | None = None
    tool_calls: Several[dict[str, Any]] | None = None


class ResponseFormat(Body):
    type: str


class ChatAsked(SampledBody):
    """The body of ``/v1/chat/completions``."""

    messages: Several[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: Several[str] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _spoken(self) -> ChatAsked:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true alone")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice is auto or none: this server cannot make a model call a tool")
        if self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format is text: this server does not constrain what a model says")
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities is text alone")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class TokenizeAsked(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    tools: Several[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one(self) -> TokenizeAsked:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give one of prompt and messages")
        return self


class ExplainAsked(TokenizeAsked):
    """``namespace``: an administrator's, in place of the tenant's own."""

    prompt: str | Several[int] | None = None  # type: ignore[assignment]
    cache_salt: str = Field("", max_length=512)
    namespace: str | None = None


class DetokenizeAsked(Body):
    model: str | None = None
    tokens: Several[int]


class StoreAsked(Body):
    url: str


def refused(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, in the API's own shape."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(each) for each in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {message}", code="invalid_json")
    return ApiError(400, f"{place}: {message}" if place else message, param=place)
