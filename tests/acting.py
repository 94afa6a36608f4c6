"""A user's objects that do something at their n-th call: raise, cancel, call back."""

import torch
from transformers import LogitsProcessor, StoppingCriteria


class Streamer:
    def __init__(self, in_put=None, in_end=None, at=2):
        self.puts, self.ends, self.in_put, self.in_end, self.at = 0, 0, in_put, in_end, at

    def put(self, value):
        self.puts += 1
        if self.in_put is not None and self.puts == self.at:
            self.in_put()

    def end(self):
        self.ends += 1
        if self.in_end is not None:
            self.in_end()


class Processor(LogitsProcessor):
    def __init__(self, act, at=3):
        self.calls, self.act, self.at = 0, act, at

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.at:
            self.act()
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, act, at=3):
        self.calls, self.act, self.at = 0, act, at

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            self.act()
        return torch.zeros(len(input_ids), dtype=torch.bool)
