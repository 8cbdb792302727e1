package invalidation

import (
	"errors"
	"strings"
	"testing"
)

// Times are answered as those of RFC 3339, which has no years before Christ.
func TestOptionsThatCannotBeKeptAreRefusedByName(t *testing.T) {
	b := newBed(t, Config{})
	for args, problem := range map[string]string{
		`priority => 70000`:         "priority is not between 0 and 9",
		`priority => -70000`:        "priority is not between 0 and 9",
		`due_at => '0044-03-15 BC'`: "must be from year 1 on",
	} {
		b.wantInvalid(`SELECT penstock.push('work', '{}', `+args+`)`, problem)
	}
	for _, entries := range []string{`{"payload": 1}`, `[1]`, `7`} {
		b.wantInvalid(`SELECT penstock.push_json('work', '`+entries+`')`, "not an array of objects")
	}
}

func (b *bed) wantInvalid(statement, problem string) {
	b.Helper()
	_, err := b.pool.Exec(b.ctx, statement)
	if err = Translate(err); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), problem) {
		b.Errorf("%s: %v, want %q", statement, err, problem)
	}
}
