from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import Metrics, Reading


def parsed(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_answers_are_counted_by_route_method_and_status() -> None:
    metrics = Metrics()
    metrics.answered("/v1/score", "POST", 200, 0.003)
    metrics.answered("/v1/score", "POST", 200, 0.003)
    metrics.answered("unmatched", "${x}", 404, 0.001)
    found = parsed(metrics)
    labels = (("method", "POST"), ("route", "/v1/score"), ("status", "200"))
    assert found["tidegate_http_requests_total", labels] == 2
    assert found["tidegate_http_request_seconds_count", (("route", "/v1/score"),)] == 2
    assert found["tidegate_http_requests_total", (("method", "other"), ("route", "unmatched"), ("status", "404"))] == 1


def test_registries_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.disconnects.inc()
    assert parsed(first)["tidegate_http_disconnects_total", ()] == 1
    assert parsed(second)["tidegate_http_disconnects_total", ()] == 0


def test_watched_numbers_are_read_at_each_scrape() -> None:
    metrics, value = Metrics(), 0

    def read() -> list[Reading]:
        nonlocal value
        value += 1
        return [
            Reading("tidegate_x_total", "X.", (((), value),), counter=True),
            Reading("tidegate_y", "Y.", ((("a",), 1.0), (("b",), 2.0)), ("kind",)),
        ]

    metrics.watch(read)
    assert parsed(metrics)["tidegate_x_total", ()] == 1
    found = parsed(metrics)
    assert found["tidegate_x_total", ()] == 2
    assert found["tidegate_y", (("kind", "b"),)] == 2.0
