package scale

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// write writes what a round of the applier found and did, within the term. Nothing is written where it found nothing
// new.
func (a *applier) write(ctx context.Context, s applied, place string, todo *steps) error {
	found := s
	found.Place = place
	if todo.failed > 0 {
		found.Failures, found.Error, found.ErrorKind = s.Failures+1, todo.message, startError
	} else if todo.healthy || s.Failures == 0 {
		found.Failures = 0
		if !s.noRoom(s.now()) || s.ErrorKind != noRoomError {
			found.Error, found.ErrorKind = "", ""
		}
	}
	var notice string
	a.noted(s.Name, func(n *notes) { notice = n.message() })
	found.Error = cmp.Or(found.Error, notice, todo.refusal(), todo.overdue)
	if !todo.changes(s, found) {
		return nil
	}
	err := a.fence.InTx(ctx, func(tx pgx.Tx) error { return todo.writeTx(ctx, tx, found) })
	if err == nil {
		a.noted(s.Name, func(n *notes) { n.refuse(todo, time.Now()) })
		a.count(func(st *OrderStatus) { st.Drained += int64(len(todo.drain)) })
	}
	return err
}

// changes says whether a round has anything to write where found is to replace s: a report is written again before it
// counts as old.
func (p steps) changes(s, found applied) bool {
	steps := len(p.register) + len(p.forget) + len(p.drain) + len(p.undrain)
	old := s.SeenAt == nil || s.ahead || !s.reported() || s.now().Sub(*s.SeenAt) > seenEvery-time.Second
	same := s.Existing != nil && *s.Existing == p.existing && slices.EqualFunc(s.Starting, p.starting, time.Time.Equal)
	newOrder := p.order != nil && (p.order.ID != s.OrderID || p.order.Count != s.Ordered)
	newRemoval := !maps.EqualFunc(p.removing, s.RemovingSince, time.Time.Equal)
	newUnhealthy := !maps.EqualFunc(p.unhealthy, s.Unhealthy, time.Time.Equal)
	return steps > 0 || old || !same || newOrder || newRemoval || newUnhealthy ||
		found.Failures != s.Failures || found.Error != s.Error || found.ErrorKind != s.ErrorKind ||
		found.Place != s.Place
}

// lockLimitsSQL comes before lockSQL where an instance may be new, whose model's queue may have to be made.
const lockLimitsSQL = `SELECT penstock.lock_all_limits()`

// lockSQL locks the rows that a round changes, with those that it takes over, before the first change, which locks
// the row of inference_version: a probe locks the row of its instance, and then that one.
const lockSQL = `
SELECT FROM penstock.instance i
 WHERE i.model = $1 AND (i.server = ANY ($2) OR i.id = ANY ($3) OR i.endpoint = ANY ($4)) ORDER BY i.id FOR UPDATE`

const undrainSQL = `SELECT penstock.end_scale_drain($1)`

// observedSQL writes what a round found, and the order that it is about to give ($8 is its id, $9 its count; NULL where
// there is none). In a row that exists, some columns get another value than in a new one:
//
//	order_id, ordered    stay where there is no order
//	ordered_at           since when the starts are under way that are not reported: now, where the count grows, or
//	                     where they take the place of instances that went ($15)
//	failed_at, retry_at  now, and $12 later, where starts failed in this round ($11). There is no pause any more
//	                     where failures end
//	decided_at           NULL where instances were taken over ($16): the number was decided without them, and is to
//	                     be decided anew
//
// Times in the future, from before the clock was set back, are set to now.
const observedSQL = `
INSERT INTO penstock.deployment_state AS s
       (name, seen_at, existing, starting, place, removing, removing_since, unhealthy,
        order_id, ordered, ordered_at,
        failures, failed_at, retry_at, error, error_kind)
SELECT $1, clock_timestamp(), $2, $3::timestamptz[], nullif($4, ''), $5, coalesce($6::jsonb, '{}'), $7,
       coalesce($8::bigint, 0), coalesce($9::integer, 0), CASE WHEN $8::bigint IS NOT NULL THEN clock_timestamp() END,
       $10, CASE WHEN $11 THEN clock_timestamp() END, clock_timestamp() + $12::interval, nullif($13, ''), $14
 WHERE EXISTS (SELECT FROM penstock.deployment d WHERE d.name = $1)
ON CONFLICT (name) DO UPDATE
   SET seen_at = excluded.seen_at, existing = excluded.existing, starting = excluded.starting, place = excluded.place,
       removing = excluded.removing, removing_since = excluded.removing_since, unhealthy = excluded.unhealthy,
       failures = excluded.failures, error = excluded.error, error_kind = excluded.error_kind,
       order_id = coalesce($8::bigint, s.order_id), ordered = coalesce($9::integer, s.ordered),
       ordered_at = CASE WHEN $15 THEN excluded.seen_at
                         WHEN $9 > s.ordered OR s.ordered_at IS NULL THEN coalesce(excluded.ordered_at, s.ordered_at)
                         WHEN s.ordered_at > excluded.seen_at THEN excluded.seen_at
                         ELSE s.ordered_at END,
       failed_at = CASE WHEN $11 THEN excluded.failed_at
                        WHEN s.failed_at > excluded.seen_at THEN excluded.seen_at
                        ELSE s.failed_at END,
       retry_at = CASE WHEN $11 THEN excluded.retry_at
                       WHEN excluded.failures = 0 AND s.failures > 0 THEN NULL
                       ELSE s.retry_at END,
       decided_at = CASE WHEN $16 THEN NULL
                         WHEN s.decided_at > excluded.seen_at THEN excluded.seen_at
                         ELSE s.decided_at END,
       applied_at = CASE WHEN s.applied_at > excluded.seen_at THEN excluded.seen_at ELSE s.applied_at END,
       no_room_at = CASE WHEN s.no_room_at > excluded.seen_at THEN excluded.seen_at ELSE s.no_room_at END`

// writeTx is the transaction of write: the locks, the instances, then the state of the deployment as it was found.
func (p *steps) writeTx(ctx context.Context, tx pgx.Tx, s applied) error {
	if len(p.register) > 0 {
		if _, err := tx.Exec(ctx, lockLimitsSQL); err != nil {
			return fmt.Errorf("lock limits: %w", err)
		}
	}
	names := slices.Concat(p.forget, p.drain, servers(p.register))
	if _, err := tx.Exec(ctx, lockSQL, s.Model, names, p.undrain, endpoints(p.register)); err != nil {
		return fmt.Errorf("lock instances: %w", err)
	}
	refused, err := p.writeInstances(ctx, tx, s)
	if err != nil {
		return err
	}
	if refused != nil {
		s.Error, s.ErrorKind = messageOf(refused), ""
	}
	if len(p.undrain) > 0 {
		if _, err := tx.Exec(ctx, undrainSQL, p.undrain); err != nil {
			return fmt.Errorf("end drains: %w", err)
		}
	}
	var id *int64
	var count *int
	if p.order != nil {
		id, count = &p.order.ID, &p.order.Count
	}
	removing := append([]string{}, slices.Sorted(maps.Keys(p.removing))...)
	_, err = tx.Exec(ctx, observedSQL, s.Name,
		p.existing, p.starts(), s.Place, removing, p.removing, p.unhealthySince(),
		id, count,
		s.Failures, p.failed > 0, backoff(s.Failures), s.Error, s.ErrorKind,
		p.anew, p.adopted())
	return err
}

const forgetSQL = `SELECT penstock.remove_instance($1, $2, false, $3, 'autoscaler')`

const drainSQL = `
SELECT penstock.drain_instance(i.model, i.server, $4, 'autoscaler')
  FROM penstock.instance i WHERE i.deployment = $1 AND i.model = $2 AND i.server = $3`

// writeInstances registers, forgets and drains instances, each under a savepoint: one that is refused holds up no other
// one, and is told by the first error.
func (p *steps) writeInstances(ctx context.Context, tx pgx.Tx, s applied) (refused, err error) {
	each := func(names []string, doing string, change func(tx pgx.Tx, name string) error) (failed map[string]error) {
		failed = map[string]error{}
		for _, name := range names {
			if err != nil {
				return failed
			}
			one := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return change(tx, name) })
			var told *pgconn.PgError
			if one == nil {
				continue
			}
			one = fmt.Errorf("%s %s: %w", doing, name, one)
			if !errors.As(one, &told) || strings.HasPrefix(told.Code, "40") || strings.HasPrefix(told.Code, "57") {
				err = one // of the session or the transaction
				return failed
			}
			failed[name] = one
			refused = cmp.Or(refused, one)
		}
		return failed
	}
	byName := map[string]BackendInstance{}
	for _, i := range p.register {
		byName[i.Name] = i
	}
	p.refused = each(servers(p.register), "register", func(tx pgx.Tx, name string) error {
		return register(ctx, tx, s, byName[name])
	})
	each(p.forget, "forget", func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, forgetSQL, s.Model, name, "its backend does not have it any more")
		return err
	})
	each(p.drain, "drain", func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, drainSQL, s.Name, s.Model, name, fmt.Sprintf("%d desired", s.Desired))
		return err
	})
	return refused, err
}

const announceSQL = `
SELECT penstock.announce_instance($1, $2, $3, $4, '{}', NULL, $5, nullif($6, ''), $7, 'autoscaler', $8)`

// register registers an instance that a backend reported: with the slots of the policy where the backend knows none.
// Without the time at which its start began, where that was not followed, its age is no cold start.
func register(ctx context.Context, tx pgx.Tx, s applied, i BackendInstance) error {
	slots := max(i.Slots, 1)
	if i.Slots == 0 {
		slots = s.policy.WithDefaults().Slots
	}
	var began *time.Time
	if s.followed(i.Began) {
		began = &i.Began
	}
	_, err := tx.Exec(ctx, announceSQL, s.Model, i.Name, i.Endpoint, slots, s.Name, i.TemplateHash, began,
		i.Began)
	return err
}

func servers(instances []BackendInstance) []string {
	names := make([]string, len(instances))
	for n, i := range instances {
		names[n] = i.Name
	}
	return names
}

func endpoints(instances []BackendInstance) []string {
	all := make([]string, len(instances))
	for n, i := range instances {
		all[n] = i.Endpoint
	}
	return all
}

func (p steps) unhealthySince() map[string]time.Time {
	if p.unhealthy == nil {
		return map[string]time.Time{}
	}
	return p.unhealthy
}

func (p steps) starts() []time.Time {
	if p.starting == nil {
		return []time.Time{}
	}
	return p.starting
}
