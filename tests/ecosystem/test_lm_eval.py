"""Promise: lm-evaluation-harness gets from a wrapped model what it gets from a plain one, and its answers by Orca."""

import json

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from tiny import make_model, make_tokenizer

import orca_hf
from orca_hf import OrcaConfig

QUESTIONS = [" ".join(f"w{5 + (7 * row + place) % 80}" for place in range(3 + 4 * row % 11)) for row in range(9)]
ROWS = [{"question": question, "answer": f"w{row + 20}"} for row, question in enumerate(QUESTIONS)]
# Some stop early and some never; one is two words, which may come in any tokens.
UNTIL = ["w79 w84", "w15", "w42"]
ANSWERS = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
ANSWERS |= {"generation_kwargs": {"until": UNTIL, "max_gen_toks": 24, "do_sample": False}}
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": ["w20", "w21", "w22"], "doc_to_target": 0}


def harness(wrapped, ends=(2,), **options):
    model = make_model()
    model.generation_config.eos_token_id = list(ends)
    if wrapped:
        orca_hf.wrap(model, OrcaConfig(max_slots=2048))
    return model, HFLM(pretrained=model, tokenizer=make_tokenizer(), max_length=100, **options)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))

    def make(name, **options):
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder)}}
        texts = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "test_split": "test"}
        return ConfigurableTask(config={"task": name, **data, **texts, **options})

    return make


def evaluate(model, task):
    # What simple_evaluate() calls, without its look around the machine, which takes half a minute.
    result = lm_eval.evaluate(lm=model, task_dict={task.config.task: task}, log_samples=True, bootstrap_iters=0)
    (samples,) = result["samples"].values()
    (scores,) = result["results"].values()
    return [(sample["doc_id"], sample["resps"]) for sample in samples], scores


@pytest.mark.parametrize("ends", [(2,), tuple(range(2, 30))], ids=["rarely EOS", "often EOS"])
@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_answers_are_native_ones_by_orca(task, batch_size, ends):
    """The harness stops a batch by a criterion of its own, which keeps a flag for each row; rows that EOS has ended
    stay in its sight."""
    results = []
    for wrapped in (False, True):
        model, lm = harness(wrapped, ends, batch_size=batch_size, max_batch_size=4)
        results.append(evaluate(lm, task("answers", **ANSWERS)))
    assert results[0] == results[1]
    answers = {answer for _, ((answer,),) in results[0][0]}
    assert len(answers) > 4
    assert len({len(answer.split()) for answer in answers}) > 2
    (engine,) = model.generate.engines
    assert engine.stats.num_iterations >= 12


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 0.8}, {"num_beams": 2}], ids=str)
def test_the_harnesss_generation_options_are_answered_as_natively(options):
    results = []
    for wrapped in (False, True):
        _, lm = harness(wrapped, batch_size=4)
        lm.model.generation_config.top_k = 20
        torch.manual_seed(0)
        kwargs = {"until": UNTIL, "max_gen_toks": 10, **options}
        requests = [Instance("generate_until", {}, (row["question"], kwargs), i) for i, row in enumerate(ROWS)]
        results.append(lm.generate_until(requests, disable_tqdm=True))
    assert results[0] == results[1]


def test_likelihoods_are_native_ones_before_and_after_answers(task):
    """The harness's own forward, in between generate() calls; it is never Orca's."""
    results = []
    for wrapped in (False, True):
        _, lm = harness(wrapped, batch_size=4)
        first = evaluate(lm, task("choices", **CHOICES))
        evaluate(lm, task("answers", **ANSWERS))
        results.append((first, evaluate(lm, task("choices", **CHOICES))))
    assert results[0] == results[1]
    assert results[1][0] == results[1][1]
