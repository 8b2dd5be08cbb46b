"""Which pages a profile is, and whose profiles go."""

from serving.engine.profiles import Profile, Profiles


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def kept(profiles: Profiles, text: str, tenant: str = "t", name: str = "p") -> str:
    profile, _ = profiles.keep((tenant, name), keys(text))
    return "" if profile is None else b"".join(profile.keys).decode()


def test_a_profile_is_what_its_prompts_have_in_common() -> None:
    profiles = Profiles(page_bytes=1, quota_bytes=100)
    assert kept(profiles, "abcdef") == "abcdef"
    assert kept(profiles, "abcdxy") == "abcd"
    assert kept(profiles, "abcdzzzz") == "abcd"
    assert kept(profiles, "ab") == "abcd"  # shorter: says nothing about the rest
    assert kept(profiles, "axyz") == "axyz"  # less than half in common: another context
    assert kept(profiles, "q") == "q"


def test_the_replaced_one_is_told_and_the_same_one_stays() -> None:
    profiles = Profiles(page_bytes=1, quota_bytes=100)
    first, gone = profiles.keep(("t", "p"), keys("abcd"))
    assert gone == []
    assert first is not None
    assert profiles.keep(("t", "p"), keys("abcdxx")) == (first, [])
    second, gone = profiles.keep(("t", "p"), keys("xyz"))
    assert gone == [first]
    assert second is not None
    assert profiles.has(second)
    assert not profiles.has(first)


def test_a_tenant_displaces_only_its_own() -> None:
    profiles = Profiles(page_bytes=2, quota_bytes=8)
    kept(profiles, "ab", tenant="other")
    kept(profiles, "ab", name="1")
    kept(profiles, "cd", name="2")
    assert profiles.get(("t", "1")) is not None  # a use
    assert kept(profiles, "ef", name="3") == "ef"
    assert [p.id for p in profiles.of("t")] == ["1", "3"]
    assert [p.id for p in profiles.of("other")] == ["p"]
    assert kept(profiles, "abcde", name="4") == ""
    assert kept(profiles, "", name="5") == ""
    assert [p.id for p in profiles.of("t")] == ["1", "3"]


def test_dropping_and_forgetting() -> None:
    profiles = Profiles(page_bytes=1, quota_bytes=8)
    old = Profile("t", "p", tuple(keys("ab")), on_disk=True)
    assert profiles.add(old) == []
    new = Profile("t", "p", tuple(keys("cd")))
    assert profiles.add(new) == [old]
    profiles.forget(old)
    assert profiles.peek(("t", "p")) is new
    assert profiles.drop(("t", "p")) is new
    assert profiles.drop(("t", "p")) is None
    assert profiles.of("nobody") == []
