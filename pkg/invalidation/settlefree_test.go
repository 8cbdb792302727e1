package invalidation

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Endings of which one meets a locked row have their rows locked in one statement, whose work grows with the number of
// endings and not with its square.
func TestRowsOfEndingsAreLockedInOnePass(t *testing.T) {
	const n = 1000
	b := newBed(t, Config{})
	b.push(make([]string, n)...)
	var keys, tokens, ids []string
	locks := b.claim(n)
	for _, l := range locks {
		keys, tokens, ids = append(keys, l.Key), append(tokens, fmt.Sprint(l.Token)), append(ids, fmt.Sprint(l.Entries[0].ID))
	}
	list := func(of []string) string { return "'{" + strings.Join(of, ",") + "}'" }
	args := fmt.Sprintf("%d, %s, %s, %s", b.q.ID, list(keys), list(tokens), list(ids))
	b.explainer().explain("busy", statement{b.q.sql.busy, args}).walk(func(p *plan) {
		if rows := p.Rows * p.Loops; rows > n {
			t.Errorf("%s of %s%s returns %.0f rows for %d endings", p.Type, p.CTE, p.Relation, rows, n)
		}
	})
	b.settle(releaseAll(locks...)...)
}

// An entry that is handed back is not changed, also after its start unless it has a start_by: another transaction that
// has locked it holds nothing up.
func TestAReleaseDoesNotWaitForItsEntry(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, Push{}, Push{}, Push{}, Push{StartBy: time.Now().Add(time.Hour)})
	locks := b.claim(4)
	reader := b.begin()
	for _, l := range locks {
		b.exec(reader, `SELECT FROM penstock.entry WHERE id = $1 FOR UPDATE`, l.Entries[0].ID)
	}
	endings := []Ending{last(Done(locks[0], locks[0].Entries[0].ID, nil, 0)), last(Release(locks[1], locks[1].Entries[0].ID, 0))}
	for _, l := range locks[2:] {
		endings = append(endings, last(Judge(&Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}, nil, ErrDraining, 0, 0)))
	}
	ours, held, err := b.q.SettleFree(b.ctx, here, endings, true)
	b.must(err)
	slices.Sort(ours)
	slices.Sort(held)
	b.want(ours, []Token{locks[1].Token, locks[2].Token})
	b.want(held, []Token{locks[0].Token, locks[3].Token})
	b.commit(reader)
	b.settle(endings[0], endings[3])
}
