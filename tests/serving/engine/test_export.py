from serving.batch import Kind
from serving.engine.export import engine_readings
from serving.engine.stats import EngineStats
from serving.metrics import Metrics


def test_every_number_of_the_stats_is_shown_once() -> None:
    stats = EngineStats()
    for value, name in enumerate(EngineStats.__dataclass_fields__, start=10):
        if isinstance(getattr(stats, name), dict):
            setattr(stats, name, {kind: value * 10.0 + i for i, kind in enumerate(Kind)})
        else:
            setattr(stats, name, value)
    readings = list(engine_readings(stats, num_compiles=7))
    assert len({reading.name for reading in readings}) == len(readings)
    assert all(reading.counter == reading.name.endswith("_total") for reading in readings)
    shown = {value for reading in readings for _, value in reading.values}
    given = [getattr(stats, name) for name in EngineStats.__dataclass_fields__]
    flat = {v for value in given for v in (value.values() if isinstance(value, dict) else [value])}
    assert shown == flat | {7}


def test_they_are_an_exposition() -> None:
    metrics = Metrics()
    metrics.watch(lambda: engine_readings(EngineStats(), num_compiles=3))
    text = metrics.render().decode()
    assert "tidegate_jit_compiles_total 3.0" in text
    assert 'tidegate_engine_steps_total{kind="score"} 0.0' in text
