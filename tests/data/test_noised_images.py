"""Images with noise and timesteps, and latents of an autoencoder."""

import gzip

import numpy as np
import pytest
import torch

from headwater.config.data import LatentDataConfig, MNISTDataConfig
from headwater.config.models.diffusion import DiTConfig
from headwater.config.models.vision import ViTConfig
from headwater.core.errors import ConfigError, DataError
from headwater.trainer.datasets import open_data


def dit(channels=2, size=(4, 6), **changes):
    vae = {"latent_channels": channels, "latent_size": list(size), "scaling_factor": 0.5}
    return DiTConfig.model_validate({"name": "dit", "num_classes": 3, "vae": vae, **changes})


def latent_config(*folders, **changes):
    section = {
        "data_processor": "DiffusionLatentImageNet1KProcessor",
        "data_dir": list(map(str, folders)),
        "batch_size": 2,
        **changes,
    }
    return LatentDataConfig.model_validate(section)


@pytest.fixture
def folders(tmp_path):
    """Return five latents in two classes and their mirror images, with a small variance."""
    for name, factor in (("plain", 1), ("flipped", -1)):
        for number, label in enumerate(("cat", "cat", "cat", "dog", "dog")):
            place = tmp_path / name / "train" / label
            place.mkdir(parents=True, exist_ok=True)
            means = np.full((2, 4, 6), factor * (number + 1), dtype=np.float32)
            log_variances = np.full((2, 4, 6), 2 * np.log(0.1), dtype=np.float32)
            np.savez(place / f"{number}.npz", vae_output=np.concatenate((means, log_variances)))
    return tmp_path / "plain", tmp_path / "flipped"


def samples_of(config, model, seed=1):
    return open_data(config, model, seed=seed, repeat=True).samples


def test_latents_are_sampled_from_the_stored_distribution(folders):
    samples = samples_of(latent_config(*folders), dit())
    assert len(samples) == 5
    batch = samples.__getitems__(list(range(100)))
    assert batch["labels"].tolist() == [0, 0, 0, 1, 1] * 20
    means = batch["inputs"].mean((1, 2, 3)) / 0.5
    torch.testing.assert_close(means.abs(), torch.tensor([1.0, 2, 3, 4, 5] * 20), rtol=0, atol=0.1)
    assert 0.3 < float((means > 0).float().mean()) < 0.7  # from either folder
    spread = (batch["inputs"] / 0.5 - means[:, None, None, None]).std()
    assert float(spread) == pytest.approx(0.1, rel=0.05)


def test_noise_is_normal_and_times_are_uniform(folders):
    batch = samples_of(latent_config(*folders), dit(label_dropout_rate=0.25)).__getitems__(list(range(2000)))
    noise, times = batch["noise"], batch["timesteps"]
    assert noise.shape == batch["inputs"].shape and noise.dtype == batch["inputs"].dtype == torch.float32
    assert abs(float(noise.mean())) < 0.02 and float(noise.std()) == pytest.approx(1, abs=0.02)
    assert 0 <= int(times.min()) < 10 and 990 <= int(times.max()) < 1000
    assert float(times.float().mean()) == pytest.approx(499.5, rel=0.05)
    assert float(batch["no_label"].float().mean()) == pytest.approx(0.25, abs=0.03)


def test_random_choices_depend_only_on_the_draw(folders):
    samples, again, other = (
        samples_of(latent_config(*folders, shuffle_seed=seed), dit()) for seed in (3, 3, 4)
    )
    whole = samples.__getitems__([0, 1, 2, 7])
    part = again.__getitems__([7, 0])
    assert all(torch.equal(part[name], whole[name][[3, 0]]) for name in whole)
    for draws, source in (
        ([5], samples),
        ([0], other),
    ):  # the same image in the next epoch, or with another seed
        found = source.__getitems__(draws)
        assert all(not torch.equal(found[name], whole[name][:1]) for name in ("inputs", "noise"))


def test_invalid_data_are_errors(folders, tmp_path):
    plain, flipped = folders
    with pytest.raises(DataError, match="set num_classes to 2"):
        samples_of(latent_config(plain, num_classes=1), dit())
    with pytest.raises(DataError, match="no images"):
        samples_of(latent_config(plain, split="val"), dit())
    found = samples_of(latent_config(plain), dit(size=(4, 4))).__getitems__([0])
    assert (
        isinstance(found, DataError) and "expected vae_output of shape [4, 4, 4], got [4, 4, 6]" in found.what
    )
    (plain / "train" / "cat" / "0.npz").write_bytes(b"PK\x03\x04")
    found = samples_of(latent_config(plain), dit()).__getitems__([0])
    assert isinstance(found, DataError) and found.where.endswith("cat/0.npz")
    np.savez(plain / "train" / "cat" / "0.npz", other=np.zeros(1))
    found = samples_of(latent_config(plain), dit()).__getitems__([0])
    assert isinstance(found, DataError) and "vae_output" in found.what
    (flipped / "train" / "dog" / "4.npz").unlink()
    with pytest.raises(DataError, match=r"dog/4\.npz is in only one"):
        samples_of(latent_config(*folders), dit())


def write_digits(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    header = bytes((0, 0, 8, 3)) + np.array(pixels.shape, dtype=">u4").tobytes()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
    header = bytes((0, 0, 8, 1)) + np.array([3], dtype=">u4").tobytes()
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes((4, 0, 9))))


def test_digits_with_noise(tmp_path):
    write_digits(tmp_path)
    config = MNISTDataConfig.model_validate(
        {"data_processor": "MNISTDataProcessor", "data_dir": str(tmp_path), "batch_size": 2}
    )
    batch = samples_of(config, dit(1, (28, 28))).__getitems__([0, 2])
    assert batch["inputs"].shape == batch["noise"].shape == (2, 1, 28, 28)
    assert batch["labels"].tolist() == [4, 9]
    found = samples_of(config, dit(1, (32, 32), patch_size=[2, 2])).__getitems__([0])
    assert isinstance(found, DataError) and "latent_size to [28, 28]" in found.remedy


def test_latents_need_a_diffusion_model(folders):
    with pytest.raises(ConfigError, match="expected data for a vision_transformer"):
        samples_of(latent_config(*folders), ViTConfig(name="vision_transformer"))
