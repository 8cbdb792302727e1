package devpostgres

import (
	"fmt"
	"strings"
)

// NotFoundError is returned if no source gave a Postgres, with the reason for each.
type NotFoundError struct {
	Attempts []Attempt
}

// Attempt is one source that was tried, and its error.
type Attempt struct {
	Source, Reason string
}

// Error lists every attempt and the possible remedies, one a line.
func (e *NotFoundError) Error() string {
	var b strings.Builder
	b.WriteString("find a Postgres: none of these worked:\n")
	for _, a := range e.Attempts {
		fmt.Fprintf(&b, "  - %s: %s\n", a.Source, strings.ReplaceAll(a.Reason, "\n", "\n    "))
	}
	fmt.Fprintf(&b, `Do one of these:
  1. install Postgres %d or newer (apt-get install postgresql; brew install postgresql; postgresapp.com)
  2. let it be fetched: PENSTOCK_ALLOW_DOWNLOAD=1 (needs npm); tests do with Docker instead
  3. name a running one: PENSTOCK_DATABASE_URL=postgres://... (for tests PENSTOCK_TEST_DATABASE_URL)`, minMajor)
	return b.String()
}

type attempts []Attempt

func (t *attempts) add(source, reason string) {
	*t = append(*t, Attempt{Source: source, Reason: reason})
}
