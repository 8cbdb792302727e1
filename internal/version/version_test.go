package version

import "testing"

func TestABuildWithoutAVersionIsNamedByItsCommit(t *testing.T) {
	const hash = "0123456789abcdef0123456789abcdef01234567"
	for _, c := range []struct {
		build            Build
		released, called string
	}{
		{Build{"v1.2.3", hash}, "v1.2.3", "v1.2.3"},
		{Build{"(devel)", hash}, "", "dev 0123456789ab"},
		{Build{"(devel)", ""}, "", "dev"},
		{Build{"unknown", ""}, "", "dev"},
		{Build{"", ""}, "", "dev"},
	} {
		if got, name := c.build.Released(), c.build.String(); got != c.released || name != c.called {
			t.Errorf("%+v: released %q, called %q; want %q and %q", c.build, got, name, c.released, c.called)
		}
	}
}

func TestTheVersionOfTheLinkerCountsFirst(t *testing.T) {
	release, commit = "v9.9.9", "abc"
	defer func() { release, commit = "", "" }()
	if b := Read(); b != (Build{"v9.9.9", "abc"}) {
		t.Errorf("got %+v", b)
	}
}
