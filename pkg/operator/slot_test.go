package operator

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

func TestSlotsOfDeadNodesAreListedAndFreedByHand(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.register_model('flux', '{"protocol": "cog"}')`)
	b.exec(`SELECT penstock.register_instance('flux', s, 'http://127.0.0.1:9/', 2) FROM unnest('{a,b}'::text[]) s`)
	b.exec(`INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids, beat_at)
		SELECT n, 'node-' || n, 'default', '1s', 1, '{}', now() + CASE n WHEN 7 THEN interval '-1 minute' ELSE '1 minute' END
		  FROM unnest('{7,8}'::int[]) n`)
	b.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id)
		SELECT i.id, n, nextval('penstock.token_seq'), CASE WHEN i.server = 'b' AND n = 1 THEN 8 ELSE 7 END
		  FROM penstock.instance i, generate_series(0, 1) n`)
	found, err := b.d.DeadSlots(b.Context(), "flux", DeadSlotsKey{}, 10)
	if err != nil || len(found) != 2 || found[0].Server != "a" || found[0].Slots != 2 || found[1].Slots != 1 || found[1].NodeID != 7 ||
		time.Since(found[0].Since) < 0 {
		t.Fatalf("slots of dead nodes: %+v, %v", found, err)
	}
	one, err := b.d.FreeDeadSlots(b.Context(), "flux", "a", by)
	if err != nil || one != 2 {
		t.Errorf("freed %d of 2 on one instance: %v", one, err)
	}
	rest, err := b.d.FreeDeadSlots(b.Context(), "flux", "", by)
	if err != nil || rest != 1 {
		t.Errorf("freed %d, want the last one: %v", rest, err)
	}
	if held, err := b.d.Slots(b.Context(), "flux", 0, 10); err != nil || len(held) != 1 || held[0].NodeID != 8 {
		t.Errorf("held are %+v, want that of the living node: %v", held, err)
	}
	written, err := b.d.Audits(b.Context(), AuditFilter{Verb: "free_dead_slots"})
	if err != nil || len(written) != 2 || written[0].Actor != by.Actor || written[0].Reason != by.Reason {
		t.Errorf("audit: %+v, %v", written, err)
	}
	if _, err := b.d.FreeDeadSlots(b.Context(), "nothing", "", by); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("of an unknown model: %v", err)
	}
	if err := b.d.SetDeviceGroup(b.Context(), "card-0", -1, by); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("a device group of -1 slots: %v", err)
	}
}

// Hours of use begin in UTC, also where the zone of the database is half an hour off. What was recorded while the clock
// was ahead is of none of the two.
func TestUseOfGPUsIsSinceTheBeginOfAnHour(t *testing.T) {
	b := newBed(t)
	b.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = ''Asia/Kolkata''', current_database()); END $$`)
	b.pool.Reset()
	b.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, model, flow)
		SELECT now() + d * interval '1 day', 1, 1, 100, 0, 0, 0, 0, 'flux', '' FROM generate_series(-1, 1, 2) d`)
	use, err := b.d.GPU(b.Context())
	since := time.Duration(use.Over * float64(time.Second))
	if begin := time.Now().Add(-since); err != nil || begin.Sub(begin.Round(time.Hour)).Abs() > 5*time.Minute {
		t.Errorf("use is since %v (%v), want a full hour", begin, err)
	}
	if use.Seconds != 0 {
		t.Errorf("use of yesterday or tomorrow is %v s of this hour and the one before", use.Seconds)
	}
}

func TestUsageIsListedByHour(t *testing.T) {
	b := newBed(t)
	b.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, model, flow)
		SELECT date_trunc('hour', now()) - h * interval '1 hour', q.id, 1, 100, 10, 7, 5, 3, 'flux', 'flow-' || f
		  FROM penstock.queue q, generate_series(0, 4) h, generate_series(0, 2) f WHERE q.name = 'work'`)
	all, err := b.d.UsageHours(b.Context(), UsageFilter{})
	if err != nil || len(all) != 15 || all[0].Queue != "work" || all[0].Application != "default" || all[0].GPUMS != 100 {
		t.Fatalf("%d rows: %+v, %v", len(all), all, err)
	}
	var paged []UsageHour
	for f := (UsageFilter{Limit: 4}); ; {
		page, err := b.d.UsageHours(b.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		paged = append(paged, page...)
		last := page[len(page)-1]
		f.After = UsageKey{Hour: last.Hour, Queue: last.Queue, Model: last.Model, Flow: last.Flow}
	}
	if fmt.Sprint(paged) != fmt.Sprint(all) {
		t.Errorf("pages bring %v, want %v", paged, all)
	}
	some, err := b.d.UsageHours(b.Context(), UsageFilter{From: all[3].Hour, To: all[6].Hour, Flow: "flow-1"})
	if err != nil || len(some) != 1 || some[0].Flow != "flow-1" || !some[0].Hour.Equal(all[3].Hour) {
		t.Errorf("one flow of one hour: %+v, %v", some, err)
	}
	b.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, model, flow, application)
		VALUES (date_trunc('hour', now()), 0, 1, 100, 0, 0, 0, 0, 'flux', 'f', 'shop')`)
	some, err = b.d.UsageHours(b.Context(), UsageFilter{Application: "shop"})
	if err != nil || len(some) != 1 || some[0].Queue != "#0" || some[0].Application != "shop" {
		t.Errorf("the application of a queue that was dropped: %+v, %v", some, err)
	}
}
