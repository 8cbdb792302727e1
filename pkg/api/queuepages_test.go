package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// With ten thousand queues each page took the samples of all of them.
func TestAPageOfQueuesReadsThoseQueuesAlone(t *testing.T) {
	w := newWorld(t)
	names := []string{"webhook"} // that of callbacks
	for i := range 12 {
		names = append(names, fmt.Sprintf("q%02d", i))
		w.exec(fmt.Sprintf(`SELECT penstock.create_queue('%s', '{}')`, names[i+1]))
	}
	slices.Sort(names)
	w.exec(`CREATE SEQUENCE public.visits`)
	w.exec(`CREATE OR REPLACE FUNCTION penstock.queue_stops(q penstock.queue)
	        RETURNS TABLE (code text, stopped_by text, reason text,
	            since timestamptz, until timestamptz)
	        LANGUAGE plpgsql VOLATILE AS $$ BEGIN PERFORM nextval('public.visits'); END $$`)
	a := New(w.pool, Config{})
	secrets := map[string][]string{
		newToken(t, w.pool, operator.Grant{Name: "all", Scopes: []string{"read"}}): names,
		newToken(t, w.pool, operator.Grant{
			Name: "two", Scopes: []string{"read"}, Queues: []string{"q03", "q11"},
		}): {"q03", "q11"},
	}
	for secret, want := range secrets {
		var got []string
		for cursor := ""; ; {
			answer := call(a, "GET", "/v1/queues?limit=5&cursor="+cursor, "", secret)
			var page struct {
				Items []operator.Queue
				Next  string `json:"next_cursor"`
			}
			if err := json.Unmarshal(answer.Body.Bytes(), &page); err != nil || answer.Code != http.StatusOK {
				t.Fatalf("%d %s (%v)", answer.Code, answer.Body, err)
			}
			for _, q := range page.Items {
				got = append(got, q.Name)
			}
			if cursor = page.Next; cursor == "" {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("the pages have %v, want %v", got, want)
		}
		if len(want) < len(names) {
			continue
		}
		visits := func(limit int) (n int) {
			w.exec(`SELECT setval('public.visits', 1, false)`)
			call(a, "GET", fmt.Sprint("/v1/queues?limit=", limit), "", secret)
			if err := w.pool.QueryRow(t.Context(), `SELECT last_value FROM public.visits`).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		// A page reads one queue more than it has, to know whether there is another one.
		if few, all := visits(5), visits(1000); few*len(names) > all*6 {
			t.Errorf("a page of 5 of %d queues costs %d visits, one of all %d", len(names), few, all)
		}
	}
}
