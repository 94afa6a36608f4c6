"""An iteration's logits, on their way to the calls that they are for."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from orca_hf.request import Request
from orca_hf.sampling import Accepted, Generation, greedy_tokens
from orca_hf.scheduler import Step
from orca_hf.speculation import Speculation
from orca_hf.warping import RowProbabilities, select_rows
from orca_hf.work import Work

Steps = Mapping[int, Step]  # sampling steps by their first row of logits


class Outcome:
    """What an iteration brings its calls. What many of them need alike is computed once, for all their rows.

    Args:
        logits: (num_sampling, vocab_size), of the steps that sample, in order.
        pending: The steps of each call.
        speculation: Judges the drafts.
        work: Where they are counted.
    """

    def __init__(
        self, logits: Tensor, pending: Mapping[Generation, Steps], speculation: Speculation, work: Work
    ) -> None:
        self._logits = logits
        self._speculation = speculation
        self._work = work
        self._probabilities = RowProbabilities(logits)
        greedy: list[int] = []
        for generation, steps in pending.items():
            if generation.is_plain_greedy:
                greedy += [row + i for row, step in steps.items() for i in range(step.num_samples)]
            elif generation.is_plain_sampling:
                generation.want_probabilities(list(steps), self._probabilities)
        tokens = greedy_tokens(select_rows(logits, greedy)) if greedy else []
        self._greedy_tokens = dict(zip(greedy, tokens, strict=True))

    def accept(self, generation: Generation, steps: Steps) -> list[Accepted]:
        """Have a call take what is for it.

        Raises:
            Exception: Whatever the call's own code raises.
        """
        rows = [row for row, step in steps.items() if not step.request.finished]  # some were cancelled in flight
        requests = [steps[row].request for row in rows]
        if not rows:
            return []
        if generation.is_plain_greedy:
            chosen = [[self._greedy_tokens[row + i] for i in range(steps[row].num_samples)] for row in rows]
            judged = [self._judged(steps[row], tokens) for row, tokens in zip(rows, chosen, strict=True)]
            accepted = generation.accept_tokens(requests, judged)
        else:
            accepted = self._accept(generation, requests, rows)
            if any(steps[row].draft for row in rows):
                row_of = dict(zip(map(id, requests), rows, strict=True))
                accepted = [self._followed(generation, row_of[id(each.request)], steps, each) for each in accepted]
        listener = generation.listener
        if listener is not None and listener.wants_logits:
            for row, (_, tokens, _) in zip(rows, accepted, strict=False):  # none is accepted where rows wait
                for i, token in enumerate(tokens):
                    listener.weigh(self._logits[row + i], token)
        return accepted

    def _accept(
        self, generation: Generation, requests: list[Request], rows: list[int], num_ahead: int = 0
    ) -> list[Accepted]:
        """Have a call make one token from each of some rows."""
        if not generation.is_plain_sampling:
            return generation.accept_logits(requests, select_rows(self._logits, rows), num_ahead)
        drawn = generation.draw_tokens(requests, rows, self._probabilities)
        return generation.accept_tokens(requests, [[token] for token in drawn], num_ahead)

    def _followed(self, generation: Generation, row: int, steps: Steps, first: Accepted) -> Accepted:
        """A request's token, and one after each guess while they are right: as the native loop would come to them."""
        step = steps[row]
        if not step.draft:
            return first
        request, tokens, over = first.request, list(first.tokens), first.over
        for num_ahead, guess in enumerate(step.draft, start=1):
            if over or tokens[-1] != guess:
                break
            ((_, token, over),) = self._accept(generation, [request], [row + num_ahead], num_ahead)
            tokens += token
        return Accepted(request, self._judged(step, tokens), over)

    def _judged(self, step: Step, tokens: list[int]) -> Sequence[int]:
        if not step.draft:
            return tokens
        accepted = self._speculation.judge(step, tokens)
        self._work.add_draft(len(step.draft), len(accepted) - 1)
        return accepted
