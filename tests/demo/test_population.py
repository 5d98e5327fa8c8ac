"""Populations of simulated users: files that say who they are, and the numbers that are refused."""

import copy
import json

import pytest

from composer_jax.demo.population import FOLDER, parse_population, read_population
from composer_jax.errors import UserError

FIRST = json.loads((FOLDER / "first.json").read_text())


def changed(**fields):
    """The values of the first population with other fields; a name with dots is a place in them."""
    values = copy.deepcopy(FIRST)
    for name, value in fields.items():
        *path, last = name.split("__")
        place = values
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        place[last] = value
    return values


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.json")))
def test_every_population_that_comes_with_the_package_is_possible(name):
    population = read_population(name)
    assert all(population.taste(user, 1) for users in population.users.values() for user in users)


def test_users_are_the_same_in_every_run_and_have_the_shares_of_their_tastes():
    one, two = read_population("first"), read_population("first")
    assert one.users == two.users
    users = [user for name in ("alder", "birch", "cedar", "elm", "fir", "hazel") for user in one.users[name]]
    before, after = ([one.taste(user, cycle) for user in users] for cycle in (6, 7))
    assert 0.65 < before.count("bob") / len(users) < 0.95 and 0.65 < after.count("eve") / len(users) < 0.95
    assert {one.taste(user, 9) for user in one.users["larch"]} == {"ann"}, "its own taste does not change"
    assert len({user.repository for user in one.users["alder"]}) > 6


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"noise": 1.2}, "noise=1.2 is not a rate; use a number from 0 to 1"),
        ({"noise": True}, "noise=True is not a rate"),
        ({"rejected__rate": -0.1}, "rejected.rate=-0.1 is not a rate"),
        ({"rejected__texts": []}, "rejected.texts is .*; give at least one text"),
        ({"revert_s": 0}, "revert_s=0 is out of range"),
        ({"tastes": {"bob": 0.5, "ann": 0.4}}, "the shares of tastes are 0.9 together; they must be 1"),
        ({"tastes": {"bill": 1.0}}, "tastes names 'bill'; use ann, bob, eve"),
        ({"changes__0__tastes": {"eve": 0.5}}, r"the shares of changes\[0\].tastes are 0.5"),
        ({"changes__0__cycle": 0}, r"changes\[0\].cycle=0 is out of range"),
        ({"patience": {"0": 1.0}}, "patience names 0 messages"),
        ({"patience": {"soon": 1.0}}, "patience names 'soon'; name numbers"),
        ({"consent": {"training": 1.5, "none": -0.5}}, "consent.training=1.5 is not a rate"),
        ({"organisations__yew__share": 0.2}, "the shares of organisations are 1.12 together"),
        ({"organisations__yew__share": 2}, "organisations.yew.share=2 is not a rate"),
        ({"organisations__yew__users": 0}, "organisations.yew.users=0 is out of range"),
        ({"organisations__yew__poison": "bill"}, "organisations.yew.poison='bill' is unknown"),
        ({"organisations__yew__name": "x"}, "organisations.yew has the field 'name', which is unknown"),
        ({"mood": 1}, "the population has the field 'mood', which is unknown"),
        ({"content": {"rate": 1}}, "content lacks the field 'texts'"),
    ],
)
def test_an_impossible_number_is_refused_by_its_name(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_population(changed(**fields))


def test_a_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.json cannot be read .*; use a JSON file, or first"):
        read_population("nowhere")
    (tmp_path / "mine.json").write_text(json.dumps(changed(lost=3)))
    with pytest.raises(UserError, match="mine.json: lost=3 is not a rate"):
        read_population(str(tmp_path / "mine.json"))
