package invalidation

import (
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// pushSQL calls penstock.push_many, which has the rules of a push. plainPushSQL repeats its plain branch: change
// both together.
const pushSQL = `
SELECT ids, verdicts
  FROM penstock.push_many($1, $2::jsonb[], $3::text[], $4::text[], $5::smallint[], $6::timestamptz[], $7::timestamptz[],
       $8::timestamptz[], $9::real[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::jsonb[],
       weights => $16::int[])`

// plainPushSQL pushes payloads $2 with no option to queue $1, where the queue asks for none either, provided that its
// payload_limit is $3 or more; $3 is an upper bound on the stored size of every payload here. It is the plain branch of
// penstock.push_many, with the queue's own table written out, which saves finding it. It returns the ids in the order
// of the payloads. It returns none, and has done nothing, where anything else is to be done or said; push_many does and
// says it. Payloads are unnested but once, and not measured: the push of a single one takes a sixth longer otherwise.
const plainPushSQL = `
WITH fresh AS (
    INSERT INTO penstock.entry_X (id, queue_id, status, priority, payload)
    SELECT nextval('penstock.entry_id_seq'), $1, 'pending', q.entry_priority, q.payload
      FROM (SELECT entry_priority, unnest($2::jsonb[]) AS payload
              FROM penstock.queue
             WHERE id = $1 AND penstock.takes_plain(queue) AND refusal IS NULL
               AND payload_limit >= $3::integer OFFSET 0) q
    RETURNING id, priority
)
INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
SELECT $1, priority, '', id, id FROM fresh
RETURNING entry_id`

// takesPlain reports whether the plain push is worth an attempt. The rule is that of penstock.takes_plain, which the
// statement asks: this saves a queue that it will refuse the round trip.
func (c *Config) takesPlain() bool {
	return c.Grouping == "" && !c.CountsDepth() && c.CapacityPerFlow == 0 && c.OnNoInstance != OnNoInstanceFail &&
		c.Shards <= 1 && c.StartWithin == 0 && c.FinishWithin == 0 && !c.Kind.ours()
}

// plain says that each push has a payload, and none uses an option.
func plain(pushes []Push) bool {
	return !slices.ContainsFunc(pushes, func(p Push) bool {
		return p.Payload == nil || p.LockKey != "" || p.Flow != "" || p.Priority != nil || !p.DueAt.IsZero() ||
			!p.StartBy.IsZero() ||
			!p.FinishBy.IsZero() || p.Cost != 0 || p.Weight != 0 || p.Name != "" ||
			p.IdempotencyKey != "" || p.UniqueKey != "" ||
			p.UniquePolicy != "" || p.Trace != "" || p.Callback != nil
	})
}

// storedMax is a number of bytes that the payload of no push exceeds as jsonb. In jsonb a value has at most
// six times the bytes of its text: a digit and a comma become a header of 4 bytes and a number of 8.
func storedMax(pushes []Push) int {
	longest := 0
	for i := range pushes {
		longest = max(longest, len(pushes[i].Payload))
	}
	return min(6*longest+64, math.MaxInt32)
}

// pushColumns lays the pushes out as one array an option; an option that no push uses stays an empty array.
func pushColumns(queue string, pushes []Push) []any {
	return []any{
		queue, payloads(pushes),
		column(pushes, func(p *Push) *string { return postgres.Given(p.LockKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Flow) }),
		column(pushes, func(p *Push) *int16 { return p.Priority }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.DueAt) }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.StartBy) }),
		column(pushes, func(p *Push) *time.Time { return givenTime(p.FinishBy) }),
		column(pushes, func(p *Push) *float64 { return postgres.Given(p.Cost) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Name) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.IdempotencyKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.UniqueKey) }),
		column(pushes, func(p *Push) *string { return postgres.Given(string(p.UniquePolicy)) }),
		column(pushes, func(p *Push) *string { return postgres.Given(p.Trace) }),
		column(pushes, func(p *Push) *json.RawMessage {
			if p.Callback == nil {
				return nil
			}
			return &p.Callback
		}),
		column(pushes, func(p *Push) *int32 { return postgres.Given(p.Weight) }),
	}
}

func payloads(pushes []Push) []json.RawMessage {
	list := make([]json.RawMessage, len(pushes))
	for i := range pushes {
		list[i] = pushes[i].Payload
	}
	return list
}

// column is one option of all pushes, up to the last push that uses it.
func column[T any](pushes []Push, option func(*Push) *T) []*T {
	values := []*T{}
	for i := range pushes {
		if v := option(&pushes[i]); v != nil {
			values = append(append(values, make([]*T, i-len(values))...), v)
		}
	}
	return values
}

func givenTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
