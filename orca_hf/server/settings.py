"""What the operator of a server decides."""

from dataclasses import dataclass

from orca_hf.server.keys import check_api_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The limits and names of one server.

    Attributes:
        model_names: What requests may call the model; answers use the first.
        max_model_len: Tokens of prompt and answer together.
        api_keys: Of which a request has to have one; none if there are none.
        hosts: Names that the server answers to; all if None.
        max_open: Answers that run or wait at once.
        max_per_client: Requests at once of one key, or of one address where there are no keys.
        max_body_bytes: Of a request.
        special_tokens_in_text: Whether the text of a special token becomes that token where a client writes it.
        strict: Whether requests with unknown fields are refused; otherwise these are logged.
        max_connections: At once; one that waits for its client makes room for a new one.
        client_timeout: Seconds that a client gets for a request's head, and for each piece of its body.
        default_max_tokens: Longest answer of a chat that does not say how long it may be.
        stall_timeout: Seconds for which a client may read nothing of a stream that is there for it.
        grace: Seconds that running requests get when the server is told to stop.

    Raises:
        ConfigError: A key is one that anybody could send, or nobody.
    """

    model_names: tuple[str, ...]
    max_model_len: int
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = ("127.0.0.1", "localhost", "::1")
    max_open: int = 1024
    max_per_client: int = 256
    max_body_bytes: int = 4 * 2**20
    special_tokens_in_text: bool = True
    strict: bool = False
    max_connections: int = 2048
    client_timeout: float = 30.0
    default_max_tokens: int = 1024
    stall_timeout: float = 120.0
    grace: float = 30.0

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a text or a list beyond which it is not read: more than fit, so that an error can say how many."""
        return 2 * self.max_model_len

    def __post_init__(self) -> None:
        check_api_keys(self.api_keys)
