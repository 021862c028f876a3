import pytest
import torch
import torch.nn.functional as F

from tapfl.errors import TapflError
from tapfl.tasks import Batch, Task, check_name, task_loss
from tests.conftest import TASKS, make_batch


@pytest.mark.parametrize(("fields", "message"), [
    (("a/b", "text_classification", ("text",), 3), "not a name"),
    (("a", "text_clasification", ("text",), 3), "did you mean 'text_classification'"),
    (("a", "text_classification", ("txt",), 3), "did you mean 'text'"),
    (("a", "text_classification", (), 3), "one or two different modalities"),
    (("a", "text_classification", ("text", "text"), 3), "one or two different modalities"),
    (("a", "text_classification", ("text",), 1), "classes must be at least 2"),
    (("a", "text_generation", ("text",), 5), "classes are for classification"),
    (("a.b", "text_generation", ("text",)), "not a name"),
    (("a", "image_generation", ("text",)), "needs the image modality"),
    (("a", "image_classification", ("text",), 3), "needs the image modality, got"),
    (("a", "text_classification", ("image",), 3), "needs the text modality, got"),
    (("a", "text_classification", ("text",), 2_000_000), "at most 1000000, got 2000000"),
    (("a", "text_classification", ("text",), 10**5000), "at most 1000000, got a number of"),
    (("text_generation", "text_generation", ("text",)), "cannot name a task"),
])
def test_bad_tasks(fields, message):
    with pytest.raises(TapflError, match=message):
        Task(*fields)


@pytest.mark.parametrize("modalities", [("image",), ("text",), ("image", "text")])
def test_text_is_written_about_either(modalities):
    assert Task("caption", "text_generation", modalities).modalities == modalities


def test_modalities_have_one_order():
    assert Task("a", "text_generation", ("text", "image")).modalities == ("image", "text")


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "", "a" * 81, "a\n", "a.", 3, "\ud800",
                                  "é", pytest.param(10**5000, id="huge"), "a" * 10**6,
                                  None])
def test_bad_names(name):
    with pytest.raises(TapflError) as caught:
        check_name(name, "client")
    assert len(str(caught.value)) < 400


def test_losses_by_hand():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    expected = -(logits.log_softmax(-1)[0, 0] + logits.log_softmax(-1)[1, 1]) / 2
    loss = task_loss(TASKS["news"], logits, torch.tensor([0, 1]), None)
    torch.testing.assert_close(loss, expected)
    a, b = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(task_loss(TASKS["paint"], a, b, None), ((a - b) ** 2).mean())
    tokens, target = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    torch.testing.assert_close(task_loss(TASKS["story"], tokens, target, mask),
                               F.cross_entropy(tokens[mask], target[mask]))


def test_batch_moves_and_counts():
    batch = make_batch(TASKS["vqa"])
    assert len(batch) == 3
    assert len(Batch()) == 0
    assert torch.equal(batch.to("cpu").text, batch.text)
