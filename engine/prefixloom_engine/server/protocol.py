"""The protocol: what bodies have in common, as OpenAI's API names it, and the errors that clients get.

Fields that the API has and this server does not serve are refused where they ask for something, and taken where they do
not, since clients send them with their neutral values. Unknown fields are ignored, as most servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_CHOICES = 128
MOST_ALTERNATIVES = 20
MOST_STOPS = 16
LONGEST_STOP = 1024
MOST_STOP_TOKENS = 1024
T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list, of which the first wrong item is told. An error for each of a million wrong items would take minutes."""


def _neutral(value: Any) -> Any:
    if value:
        raise ValueError("it is not served by this server: leave it out")
    return value


Unserved = Annotated[T | None, AfterValidator(_neutral)]
"""A field of the API that asks for nothing, or is refused."""
Salt = Annotated[str, Field(max_length=512)]


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


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Give a field that is null its default: the API lets clients say so."""
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


class Body(StrictModel):
    """A body of JSON. What reads it asks for the properties; what answers it gets it ``without_prompts``."""

    model: str | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts as text or as tokens."""
        return []

    @property
    def echoes(self) -> bool:
        """Whether the text of the prompts is a part of the answer."""
        return False

    @property
    def most_tokens(self) -> int | None:
        """The tokens of an answer; 0: none is asked for; None: the body does not say."""
        return 0

    @property
    def answers(self) -> int:
        """The number of answers that are asked for."""
        return len(self.prompts)

    def without_prompts(self) -> Body:
        """Return the body without what may be large and nobody needs once the prompts are tokens."""
        return self


class StreamOptions(StrictModel):
    include_usage: bool = False


class SampledBody(Body):
    """What asks a model for answers. The last five fields are additions to the API, which others have too."""

    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Several[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Unserved[float] = None
    frequency_penalty: Unserved[float] = None
    logit_bias: Unserved[dict[str, Any]] = None
    user: str | None = None
    cache_salt: Salt = ""
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    ttl: float | None = Field(None, ge=0, lt=2**31, allow_inf_nan=False)
    ignore_eos: bool = False
    stop_token_ids: Several[int] | None = Field(None, max_length=MOST_STOP_TOKENS)

    @model_validator(mode="after")
    def _served(self) -> SampledBody:
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

    @property
    def answers(self) -> int:
        return self.n * max(1, len(self.prompts))

    @property
    def alternatives(self) -> int | None:
        """The likeliest tokens that are told beside each token of an answer; None: no log-probability is told."""
        raise NotImplementedError


class Url(StrictModel):
    url: str


class ContentPart(StrictModel):
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


class TemplatedBody(Body):
    """What a chat template may make a prompt of."""

    messages: Several[Message] | None = None
    tools: Several[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return self.tools or []


class TokenizeAsked(TemplatedBody):
    prompt: str | Several[int] | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeAsked:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give one of prompt and messages")
        return self

    @property
    def prompts(self) -> list[Any]:
        return [] if self.prompt is None else [self.prompt]


class ExplainAsked(TokenizeAsked):
    """``namespace``: an administrator's, in place of the tenant's own."""

    cache_salt: Salt = ""
    namespace: str | None = None


class DetokenizeAsked(Body):
    tokens: Several[int]

    @property
    def prompts(self) -> list[Any]:
        return [self.tokens]

    @property
    def echoes(self) -> bool:
        return True


class StoreAsked(Body):
    url: str


def refused(error: ValidationError) -> ApiError:
    """Return the first thing that is wrong with a body, in the API's own shape."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(each) for each in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {message}", code="invalid_json")
    return ApiError(400, f"{place}: {message}" if place else message, param=place)
