import tomllib

from protocol.jobfile import job_type, parse
from protocol.jobstates import TRANSITIONS
from protocol.schema import leaves
from skerry import job_page


def test_every_key_stands_in_the_page_with_a_sentence():
    rows = [line for line in job_page.page().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(key for key, _ in leaves(job_type()))
    assert all(row.rstrip(" |")[-1] == "." for row in rows)


def test_every_transition_stands_in_the_page():
    lines = job_page.page().splitlines()
    head = next(line for line in lines if line.startswith("| state |"))
    stimuli = [cell.strip() for cell in head.split("|")[2:-1]]
    found = {}
    for line in lines[lines.index(head) + 2 :]:
        state, *cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        found |= {
            (state, stimulus): cell for stimulus, cell in zip(stimuli, cells, strict=True) if cell
        }
    assert found == TRANSITIONS


def test_the_smallest_job_in_the_page_is_a_job():
    text = job_page.page().split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(text)
    assert parse(text, where="docs/job.md").stop.versions == 50
