package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// store is what the gateway says to the database about slots. None of it is on the way of a request.
type store struct {
	db   postgres.DB
	node func() invalidation.NodeID
}

// grant is slots that the gateway may use, and for how long by the database's clock, from when it asked.
type grant struct {
	slots []SlotKey
	valid time.Duration
}

// WarmSlots lets a new session plan the statements about slots, for a model that does not exist and so without effect:
// the first lease of a session takes 30 ms of CPU, the next ones 2.
func WarmSlots(ctx context.Context, conn *pgx.Conn) error {
	const none = ""
	bounded, cancel := context.WithTimeout(ctx, warmMax)
	defer cancel()
	s := store{conn, func() invalidation.NodeID { return 0 }}
	_, leased := s.lease(bounded, none, 0, limited{[]int32{}, []int32{}})
	_, offered := s.offer(bounded, none, nil)
	_, preempted := conn.Exec(bounded, warmPreemptSQL)
	_, shared := s.shares(bounded, nil)
	_, held := s.held(bounded)
	released, withdrawn := s.release(bounded, none, nil), s.withdraw(bounded, none)
	return errors.Join(leased, offered, released, preempted, shared, held, withdrawn)
}

// warmPreemptSQL preempts no run of a model that exists: of another one not even the plans are made.
const warmPreemptSQL = `SELECT penstock.preempt_durable(m.name, 0, 0) FROM penstock.model m LIMIT 1`

// warmMax bounds the time of WarmSlots.
const warmMax = 5 * time.Second

const leaseSQL = `
SELECT instance, slot_number, slot_token, valid_ms FROM penstock.lease_slots_within($1, $2, $3, $4, $5)`

// lease asks for up to want slots of a model. Where there are none the database remembers the demand and
// tells the holders of idle ones. Of limited instances it gets no more than these could use.
func (s *store) lease(ctx context.Context, model string, want int, limited limited) (grant, error) {
	var g grant
	var slot SlotKey
	var millis int64
	rows := postgres.Query(ctx, s.db, leaseSQL, model, s.node(), want, limited.instances, limited.rooms)
	_, err := pgx.ForEachRow(rows,
		[]any{&slot.Instance, &slot.Number, &slot.Token, &millis}, func() error {
			g.slots, g.valid = append(g.slots, slot), time.Duration(millis)*time.Millisecond
			return nil
		})
	if err != nil {
		return grant{}, fmt.Errorf("lease %d slots of model %q: %w", want, model, err)
	}
	return g, nil
}

const heldSQL = `SELECT instance, slot_number, slot_token, in_doubt, valid_ms FROM penstock.held_slots($1)`

// held reads which slots are this gateway's.
func (s *store) held(ctx context.Context) (grant, error) {
	var g grant
	var instance, number *int32
	var token *int64
	var doubt bool
	var millis int64
	_, err := pgx.ForEachRow(postgres.Query(ctx, s.db, heldSQL, s.node()),
		[]any{&instance, &number, &token, &doubt, &millis}, func() error {
			g.valid = time.Duration(millis) * time.Millisecond
			if instance != nil && !doubt {
				g.slots = append(g.slots, SlotKey{*instance, *number, *token})
			}
			return nil
		})
	if err != nil {
		return grant{}, fmt.Errorf("read held slots: %w", err)
	}
	return g, nil
}

// withdrawSQL ends the demand of a node for slots of a model. It does not wait for the disk: after a crash the demand
// lapses by itself.
const withdrawSQL = `
UPDATE penstock.slot_demand SET missing = 0
 WHERE model = $1 AND node_id = $2 AND missing > 0 AND set_config('synchronous_commit', 'off', true) <> ''`

func (s *store) withdraw(ctx context.Context, model string) error {
	if _, err := s.db.Exec(ctx, withdrawSQL, model, s.node()); err != nil {
		return fmt.Errorf("withdraw the demand for slots of model %q: %w", model, err)
	}
	return nil
}

const offerSQL = `SELECT penstock.offer_slots($1, $2, $3, $4, $5)`

// offer gives as many slots as the other nodes miss together, from the first on, to those that miss some. It returns
// how many they missed, which may be more than were offered; the rest of the slots stays this gateway's.
func (s *store) offer(ctx context.Context, model string, slots []SlotKey) (missed int, err error) {
	instances, numbers, tokens := columns(slots)
	err = s.db.QueryRow(ctx, offerSQL, model, s.node(), instances, numbers, tokens).Scan(&missed)
	if err != nil {
		return 0, fmt.Errorf("offer %d slots of model %q: %w", len(slots), model, err)
	}
	return missed, nil
}

const handOverSQL = `SELECT penstock.hand_over_slots($1, $2, $3, $4, $5)`

// release hands slots to gateways that miss some, and frees the rest.
func (s *store) release(ctx context.Context, model string, slots []SlotKey) error {
	instances, numbers, tokens := columns(slots)
	if _, err := s.db.Exec(ctx, handOverSQL, model, s.node(), instances, numbers, tokens); err != nil {
		return fmt.Errorf("give back %d slots of model %q: %w", len(slots), model, err)
	}
	return nil
}

const leaveSQL = `SELECT penstock.leave_gateway($1, $2, $3)`

// leave removes the gateway's row and frees its slots, apart from those that are busy, by their tokens. No lease of the
// models and no hand-over to the gateway that is under way takes effect behind it.
func (s *store) leave(ctx context.Context, models []string, busy []int64) error {
	if _, err := s.db.Exec(ctx, leaveSQL, s.node(), models, busy); err != nil {
		return fmt.Errorf("leave: %w", err)
	}
	return nil
}

// doubtSQL says that the calls on some slots may still run although this gateway has left them.
const doubtSQL = `
UPDATE penstock.slot s
   SET doubt_at = clock_timestamp(), doubt = k.reason
  FROM unnest($1::int[], $2::int[], $3::bigint[], $4::text[]) k(instance_id, number, token, reason)
 WHERE s.instance_id = k.instance_id AND s.number = k.number AND s.token = k.token`

func (s *store) doubt(ctx context.Context, slots []SlotKey, reasons []string) error {
	instances, numbers, tokens := columns(slots)
	if _, err := s.db.Exec(ctx, doubtSQL, instances, numbers, tokens, reasons); err != nil {
		return fmt.Errorf("mark %d slots in doubt: %w", len(slots), err)
	}
	return nil
}

const preemptSQL = `SELECT penstock.preempt_durable($1, $2, $3)`

// preempt orders the end of up to want runs of durable entries.
func (s *store) preempt(ctx context.Context, model string, want int) (ordered int, err error) {
	if err := s.db.QueryRow(ctx, preemptSQL, model, s.node(), want).Scan(&ordered); err != nil {
		return 0, fmt.Errorf("preempt %d runs of model %q: %w", want, model, err)
	}
	return ordered, nil
}

// shareOf is what a gateway may hold of a model of which other nodes go without.
type shareOf struct {
	slots int
	short int // slots that other nodes, gateways and task nodes, miss below their own shares
}

const sharesSQL = `
SELECT m.name, m.share,
       coalesce((SELECT sum(least(d.missing, o.share - h.held))
                   FROM penstock.hungry_nodes(m.name) h
                   JOIN penstock.slot_demand d ON d.model = m.name AND d.node_id = h.node_id
                  CROSS JOIN LATERAL (SELECT penstock.slot_share(m.name, h.node_id) AS share) o
                  WHERE h.node_id <> $2 AND h.held < o.share), 0)
  FROM (SELECT n.name, penstock.slot_share(n.name, $2) AS share FROM unnest($1::text[]) n(name)) m
 WHERE m.share IS NOT NULL`

// shares reads the gateway's shares of those models of which other nodes go without.
func (s *store) shares(ctx context.Context, names []string) (map[string]shareOf, error) {
	shares := map[string]shareOf{}
	var name string
	var share shareOf
	_, err := pgx.ForEachRow(postgres.Query(ctx, s.db, sharesSQL, names, s.node()),
		[]any{&name, &share.slots, &share.short}, func() error {
			shares[name] = share
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read shares of slots: %w", err)
	}
	return shares, nil
}

const sweepSQL = `SELECT penstock.sweep_gateways()`

func (s *store) sweep(ctx context.Context) error {
	if _, err := s.db.Exec(ctx, sweepSQL); err != nil {
		return fmt.Errorf("sweep preemptions: %w", err)
	}
	return nil
}

const foldSQL = `
SELECT penstock.fold_online_gpu($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`

func columns(slots []SlotKey) (instances, numbers []int32, tokens []int64) {
	for _, s := range slots {
		instances, numbers, tokens = append(instances, s.Instance), append(numbers, s.Number), append(tokens, s.Token)
	}
	return instances, numbers, tokens
}
