"""Models are found by name, have the papers' sizes, and score as PyTorch would; what cannot be trained is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import models
from models.networks import CNN, LeNet, Linear

LOSSES, METRICS = models.LOSSES, models.METRICS
Write = Callable[[str], str]

_numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that writes a module next to the user's own code and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source: str) -> str:
        # A new name each time, since both Python and `models.load` remember what they have seen.
        name = f"garden_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\nimport models\n{source}\n")
        return name

    return write_module


# --- the papers' networks


@pytest.mark.parametrize(
    # That for ten classes is ours: 52 classes less, each with 128 weights and a bias.
    ("name", "parameters"),
    [("linear", 2), ("mlp", 11), ("cnn", 1_206_590), ("cnn10", 1_199_882), ("lenet", 44_054), ("lenet10", 13_426)],
)
def test_networks_have_as_many_parameters_as_the_papers_say(name: str, parameters: int) -> None:
    model = models.load(name)
    assert model.num_parameters == parameters
    assert sum(value.size for value in model.initial(0).values()) == parameters


@pytest.mark.parametrize(
    ("name", "loss", "metric"),
    [
        ("linear", "mse", "rmse"),
        ("mlp", "rmse", "rmse"),
        ("cnn", "cross-entropy", "accuracy"),
        ("cnn10", "cross-entropy", "accuracy"),
        ("lenet", "cross-entropy", "accuracy"),
        ("lenet10", "cross-entropy", "accuracy"),
    ],
)
def test_networks_bring_the_papers_losses(name: str, loss: str, metric: str) -> None:
    model = models.load(name)
    assert (model.name, model.loss.name, model.metric.name) == (name, loss, metric)


def test_shapes_are_those_of_the_state_dict() -> None:
    assert models.load("linear").shapes == {"weight": (1, 2)}
    assert models.load("mlp").shapes == {"0.weight": (2, 3), "0.bias": (2,), "2.weight": (1, 2), "2.bias": (1,)}


def test_the_linear_model_has_no_intercept() -> None:
    theta = {"weight": torch.tensor([[5.0, 6.0]])}
    inputs = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.5, 2.0]])
    assert models.load("linear").apply(theta, inputs).tolist() == [[0], [-1], [14.5]]


def test_the_hospital_network_is_two_rectified_units() -> None:
    parameters = {
        "0.weight": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
        "0.bias": torch.tensor([0.0, -1.0]),
        "2.weight": torch.tensor([[2.0, 3.0]]),
        "2.bias": torch.tensor([0.5]),
    }
    # Units relu(1), relu(2 + 3 - 1), then relu(-1), relu(0 + 0 - 1).
    inputs = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.0]])
    assert models.load("mlp").apply(parameters, inputs).tolist() == [[2 * 1 + 3 * 4 + 0.5], [0.5]]


@pytest.mark.parametrize("kind", [CNN, LeNet])
def test_the_image_networks_take_images_with_and_without_a_channel(kind: type[CNN | LeNet]) -> None:
    network = kind(classes=10)
    images = torch.rand(3, 28, 28)
    with torch.inference_mode():
        flat, channelled = network(images), network(images.unsqueeze(1))
    assert flat.shape == (3, 10)
    assert torch.equal(flat, channelled)


@pytest.mark.parametrize(("name", "classes"), [("cnn", 62), ("cnn10", 10), ("lenet", 62), ("lenet10", 10)])
def test_the_image_networks_have_an_output_for_each_class(name: str, classes: int) -> None:
    with torch.inference_mode():
        assert models.load(name).module(torch.rand(3, 28, 28)).shape == (3, classes)


def test_the_network_that_leaks_is_twice_differentiable_and_starts_uniformly() -> None:
    parameters = {name: torch.from_numpy(value) for name, value in models.load("lenet10").initial(0).items()}
    drawn = torch.cat([value.flatten() for value in parameters.values()])
    assert stats.kstest(drawn.numpy(), stats.uniform(-0.5, 1.0).cdf).pvalue > 1e-6
    images = torch.rand(1, 28, 28, requires_grad=True)
    (first,) = torch.autograd.grad(models.load("lenet10").apply(parameters, images).sum(), images, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), images)
    assert (second != 0).all()


def test_apply_leaves_the_models_own_network_out() -> None:
    model = models.load("linear")
    before = model.module.weight.detach().clone()
    assert model.apply({"weight": torch.zeros(1, 2)}, torch.ones(1, 2)).item() == 0
    assert torch.equal(model.module.weight, before)


# --- losses by hand


def per_sample(loss: str, outputs: list[list[float]], targets: Tensor) -> list[float]:
    values: list[float] = LOSSES[loss].per_sample(torch.tensor(outputs), targets).tolist()
    return values


@pytest.mark.parametrize("loss", ["mse", "rmse"])
def test_squared_error_is_summed_over_outputs(loss: str) -> None:
    assert per_sample(loss, [[1, 2], [0, 0]], torch.tensor([[0.0, 4.0], [3.0, -4.0]])) == [1 + 4, 9 + 16]


def test_squared_error_of_one_output_takes_targets_without_an_axis_for_it() -> None:
    assert per_sample("mse", [[1], [5]], torch.tensor([3.0, 3.0])) == [4, 4]


def test_squared_error_takes_classes_as_one_hot() -> None:
    # Against (0, 0, 1) and (1, 0, 0).
    assert per_sample("mse", [[0, 0, 1], [0, 2, 1]], torch.tensor([2, 0])) == [0, 1 + 4 + 1]


def test_squared_error_of_one_output_takes_whole_numbers_as_numbers() -> None:
    assert per_sample("mse", [[1], [5]], torch.tensor([3, -3])) == [4, 64]


def test_cross_entropy_of_even_odds_is_the_logarithm_of_the_number_of_classes() -> None:
    assert per_sample("cross-entropy", [[7.0] * 4], torch.tensor([2])) == pytest.approx([np.log(4)])


def test_cross_entropy_of_odds_of_three_to_one() -> None:
    log3 = float(np.log(3))
    values = per_sample("cross-entropy", [[log3, 0], [log3, 0]], torch.tensor([0, 1]))
    assert values == pytest.approx([np.log(4 / 3), np.log(4)])


def test_cross_entropy_does_not_overflow() -> None:
    assert per_sample("cross-entropy", [[1e30, 0.0], [-1e30, 0.0]], torch.tensor([0, 0])) == pytest.approx([0, 1e30])


def test_accuracy_counts_where_the_largest_output_is_the_class() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    hits = METRICS["accuracy"].per_sample(outputs, torch.tensor([1, 1, 1]))
    assert hits.tolist() == [1, 0, 1]
    assert METRICS["accuracy"].report(hits.mean()).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("score", [LOSSES["mse"], LOSSES["rmse"], METRICS["rmse"]])
def test_squared_error_is_reported_as_its_root(score: models.Score) -> None:
    assert score.report(torch.tensor([0.0, 4.0, 6.25])).tolist() == [0, 2, 2.5]


def test_what_is_descended_is_the_mean_square_its_root_or_the_cross_entropy() -> None:
    mean = torch.tensor([4.0, 6.25])
    assert LOSSES["mse"].objective(mean).tolist() == [4, 6.25]
    assert LOSSES["rmse"].objective(mean).tolist() == [2, 2.5]
    assert LOSSES["cross-entropy"].objective(mean).tolist() == [4, 6.25]


@pytest.mark.parametrize(("loss", "gradient"), [("mse", [1, -7]), ("rmse", [0.1, -0.7])])
def test_gradients_of_both_squared_losses(loss: str, gradient: list[float]) -> None:
    # Two samples with residuals r = 1 and -7. The mean square m = (1 + 49) / 2 = 25 has the
    # gradient 2 r / 2 = r, and its root 5 has r / (2 * 5).
    outputs = torch.tensor([[1.0], [-7.0]], requires_grad=True)
    LOSSES[loss].objective(LOSSES[loss].per_sample(outputs, torch.zeros(2)).mean()).backward()
    assert outputs.grad is not None
    assert outputs.grad.flatten().tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_the_gradient_at_a_perfect_fit_is_finite(loss: str) -> None:
    theta = torch.tensor([[1.0, 0.0]], requires_grad=True)
    mean = LOSSES[loss].per_sample(theta, torch.tensor([0])).mean()
    LOSSES[loss].objective(mean).backward()
    assert theta.grad is not None
    assert torch.isfinite(theta.grad).all()
    if loss != "cross-entropy":
        assert theta.grad.tolist() == [[0, 0]]


# --- losses against PyTorch

logit = st.floats(-50, 50, width=32)


@st.composite
def classified(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw logits (*batch, classes) and classes (*batch,), with one or two axes in front."""
    batch = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    classes = draw(st.integers(2, 6))
    outputs = draw(hnp.arrays(np.float32, (*batch, classes), elements=logit))
    targets = draw(hnp.arrays(np.int64, batch, elements=st.integers(0, classes - 1)))
    return torch.from_numpy(outputs), torch.from_numpy(targets)


@given(classified())
def test_cross_entropy_is_pytorchs(case: tuple[Tensor, Tensor]) -> None:
    outputs, targets = case
    expected = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    values = LOSSES["cross-entropy"].per_sample(outputs, targets)
    torch.testing.assert_close(values.flatten(), expected, rtol=1e-5, atol=1e-5)


@given(classified())
def test_squared_error_of_classes_is_pytorchs(case: tuple[Tensor, Tensor]) -> None:
    outputs, targets = case
    one_hot = functional.one_hot(targets, outputs.shape[-1]).float()
    expected = functional.mse_loss(outputs, one_hot, reduction="none").sum(-1)
    torch.testing.assert_close(LOSSES["mse"].per_sample(outputs, targets), expected)


@given(classified())
def test_squared_error_of_numbers_is_pytorchs(case: tuple[Tensor, Tensor]) -> None:
    outputs, targets = case[0], case[0].flip(-1)
    expected = functional.mse_loss(outputs, targets, reduction="none").sum(-1)
    torch.testing.assert_close(LOSSES["rmse"].per_sample(outputs, targets), expected)


@given(classified())
def test_accuracy_is_the_share_of_equal_labels(case: tuple[Tensor, Tensor]) -> None:
    outputs, targets = case
    expected = np.mean(outputs.numpy().argmax(-1) == targets.numpy())
    assert METRICS["accuracy"].per_sample(outputs, targets).mean().item() == pytest.approx(expected)


# --- initial parameters


@pytest.mark.parametrize("name", list(models.MODELS))
def test_initial_parameters_are_those_of_their_seed(name: str) -> None:
    model = models.load(name)
    first, again, other = model.initial(1), model.initial(1), model.initial(2)
    assert {key: value.shape for key, value in first.items()} == model.shapes
    for key, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[key])
        # The biases of the mlp start at 0.
        assert (value != other[key]).any() != (name == "mlp" and key.endswith("bias") and not value.any())


@pytest.mark.parametrize("name", list(models.MODELS))
def test_drawing_initial_parameters_leaves_pytorchs_generator_alone(name: str) -> None:
    model = models.load(name)
    before = torch.random.get_rng_state()
    model.initial(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initial_parameters_do_not_depend_on_pytorchs_generator() -> None:
    model = models.load("mlp")
    first = model.initial(1)
    torch.rand(1)
    np.testing.assert_array_equal(first["0.weight"], model.initial(1)["0.weight"])


def test_initial_parameters_are_the_callers_own() -> None:
    model = models.load("linear")
    model.initial(1)["weight"][:] = 99
    assert (model.initial(1)["weight"] != 99).all()


def test_seeds_may_have_64_bits() -> None:
    model = models.load("linear")
    assert (model.initial(2**64 - 1)["weight"] != model.initial(2**63)["weight"]).all()


def test_the_linear_model_starts_from_a_standard_normal() -> None:
    one_of_many = models.Model("wide", lambda: Linear(100_000), LOSSES["mse"], METRICS["rmse"]).initial(0)
    many = np.concatenate([models.load("linear").initial(seed)["weight"].ravel() for seed in range(500)])
    for draws in (one_of_many["weight"].ravel(), many):
        assert stats.kstest(draws, "norm").pvalue > 1e-6


def test_a_wider_linear_model_is_still_linear() -> None:
    assert Linear(5).weight.shape == (1, 5)
    assert Linear(5).bias is None


# --- by name


def test_a_loss_may_be_asked_for() -> None:
    model = models.load("cnn", "rmse")
    assert (model.loss.name, model.metric.name) == ("rmse", "accuracy")
    assert models.load("cnn").loss.name == "cross-entropy", "the model's own is left as it is"


@pytest.mark.parametrize(("loss", "metric"), [("mse", "rmse"), ("rmse", "rmse"), ("cross-entropy", "accuracy")])
def test_a_factory_may_return_a_network(write: Write, loss: str, metric: str) -> None:
    name = write("def narrow():\n    return nn.Linear(3, 2)") + ":narrow"
    model = models.load(name, loss)
    assert (model.name, model.loss.name, model.metric.name) == (name, loss, metric)
    assert model.shapes == {"weight": (2, 3), "bias": (2,)}
    assert (model.initial(0)["weight"] != model.initial(1)["weight"]).any(), "each draw builds the network anew"


def test_a_class_of_networks_is_a_factory(write: Write) -> None:
    name = write("class Narrow(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)") + ":Narrow"
    assert models.load(name, "mse").num_parameters == 4


def test_a_factory_may_return_a_model_with_its_own_loss(write: Write) -> None:
    source = (
        "def odd():\n"
        "    return models.Model('inner', lambda: nn.Linear(3, 1), models.LOSSES['rmse'], models.METRICS['rmse'])"
    )
    name = write(source) + ":odd"
    assert (models.load(name).name, models.load(name).loss.name) == (name, "rmse")
    assert models.load(name, "mse").loss.name == "mse"


@pytest.mark.parametrize(
    ("model", "loss", "chosen"),
    [
        ("", "", ("mlp", "cross-entropy")),  # both of the federation
        ("", "mse", ("mlp", "mse")),  # its model under the run's loss
        ("linear", "", ("linear", "mse")),  # the run's model brings its own loss, not the federation's
        ("linear", "rmse", ("linear", "rmse")),  # both of the run
    ],
)
def test_the_run_chooses_before_the_federation(model: str, loss: str, chosen: tuple[str, str]) -> None:
    loaded = models.load_for(model, loss, default_model="mlp", default_loss="cross-entropy")
    assert (loaded.name, loaded.loss.name) == chosen


def test_a_federation_without_a_loss_takes_its_models() -> None:
    assert models.load_for("", "", "mlp", "").loss.name == "rmse"


def test_without_any_name_the_models_are_listed() -> None:
    with pytest.raises(ValueError, match="neither run config nor federation name a model; set model to one of linear,"):
        models.load_for("", "mse", "", "mse")


# --- what cannot be trained


def test_an_unknown_model_lists_those_there_are() -> None:
    known = "linear, mlp, cnn, cnn10, lenet, lenet10, factors-IxK or give package.module:factory"
    with pytest.raises(ValueError, match=f"unknown model 'rose'; choose from {known}"):
        models.load("rose")


def test_an_unknown_loss_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown loss 'regret'; choose from mse, rmse, cross-entropy"):
        models.load("linear", "regret")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("garden.roses:factory", "cannot import 'garden.roses' of 'garden.roses:factory': No module named 'garden'"),
        ("models:rose", r"'models' has no 'rose' \(asked for 'models:rose'\)"),
    ],
)
def test_a_factory_that_is_not_there_is_told(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        models.load(name, "mse")


def test_a_factory_whose_module_lacks_a_package_is_told(write: Write) -> None:
    name = write("import petals_of_no_package") + ":factory"
    with pytest.raises(ValueError, match=f"cannot import '{name[:-8]}' .*No module named 'petals_of_no_package'"):
        models.load(name, "mse")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "def factory():\n    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))",
            r"has buffers \['1.running_mean', '1.running_var', '1.num_batches_tracked'\]; .* GroupNorm instead",
        ),
        (
            # Such a buffer is not even in the state dict.
            "def factory():\n    net = nn.Linear(3, 2)\n"
            "    net.register_buffer('seen', torch.zeros(1), persistent=False)\n    return net",
            r"has buffers \['seen'\]",
        ),
        (
            "def factory():\n    net = nn.Linear(3, 2)\n"
            "    net.steps = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)\n    return net",
            r"has parameters that are not floating point: \['steps'\]",
        ),
        ("factory = nn.ReLU", "has no parameters"),
        ("def factory():\n    return 'a rose'", "gave a str; return a torch.nn.Module or a models.Model"),
        ("def factory():\n    return nn.Linear", "gave a type; return a torch.nn.Module or a models.Model"),
        ("def factory():\n    pass", "gave a NoneType; return"),
    ],
)
def test_a_network_that_cannot_be_trained_is_named_with_the_reason(write: Write, source: str, reason: str) -> None:
    name = write(source) + ":factory"
    with pytest.raises(ValueError, match=f"model '{name}' {reason}"):
        models.load(name, "mse")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def factory():\n    return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))", r"drop out at random: \['1'\]"),
        ("def factory():\n    return nn.Linear(3, 2).double()", r"not float32: \['weight', 'bias'\]"),
    ],
)
def test_a_network_that_the_engines_cannot_compute_is_named(write: Write, source: str, reason: str) -> None:
    name = write(source) + ":factory"
    with pytest.raises(ValueError, match=f"model '{name}' .*{reason}"):
        models.load(name, "mse")


def test_a_model_of_ones_own_is_checked_too(write: Write) -> None:
    source = (
        "def odd():\n"
        "    network = lambda: nn.BatchNorm1d(2)\n"
        "    return models.Model('inner', network, models.LOSSES['rmse'], models.METRICS['rmse'])"
    )
    name = write(source) + ":odd"
    with pytest.raises(ValueError, match=f"model '{name}' has buffers"):
        models.load(name)


def test_a_network_without_a_loss_lists_the_losses(write: Write) -> None:
    name = write("def narrow():\n    return nn.Linear(3, 1)") + ":narrow"
    with pytest.raises(ValueError, match=f"model '{name}' has no loss of its own; set loss to one of mse, rmse, cross"):
        models.load(name)


def test_normalisation_without_running_statistics_is_welcome(write: Write) -> None:
    name = write("def factory():\n    return nn.Sequential(nn.Linear(3, 2), nn.GroupNorm(1, 2))") + ":factory"
    assert models.load(name, "mse").num_parameters == 8 + 4


def test_every_model_that_comes_with_the_app_passes_its_own_checks() -> None:
    for name in models.MODELS:
        assert isinstance(models.load(name).module, nn.Module)
