package e2e_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// Batches and change logs need no handler of the user's where a queue says in SQL what to do. The statements are those of
// docs/queue-kinds.md.
func TestBatchesAndCalculatedFieldsWorkWithTheProgramsAlone(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/queue-kinds.md")
	if err != nil {
		t.Fatal(err)
	}
	p := newPlant(t, 1, worker.Model{Name: "echo"})
	p.startNode("node_a")
	p.exec(`CREATE TABLE orders (id int PRIMARY KEY, total int)`)
	p.exec(`CREATE TABLE order_line (id int PRIMARY KEY, order_id int, price int, amount int)`)
	p.exec(`CREATE TABLE photo (id int PRIMARY KEY, path text, year int, thumbnail text)`)
	p.exec(`INSERT INTO orders SELECT i FROM generate_series(1, 10) i`)
	p.exec(`INSERT INTO order_line SELECT i, 1 + i % 10, 10, 2 FROM generate_series(1, 200) i`)
	p.exec(`INSERT INTO photo SELECT i, i || '.jpg', 2026 FROM generate_series(1, 5000) i`)
	p.exec(`GRANT SELECT, UPDATE ON orders, order_line, photo TO node_a`) // its statements run with its rights
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(block[1], "pause_batch") {
			block[1], _, _ = strings.Cut(block[1], "SELECT * FROM penstock.batch_status")
			p.exec(block[1])
		} else if strings.Contains(block[1], "set_statements") {
			p.exec(block[1])
		} else if strings.Contains(block[1], "penstock.watch") {
			block[1], _, _ = strings.Cut(block[1], "UPDATE order_line")
			p.exec(block[1])
		}
	}
	p.exec(`UPDATE order_line SET price = 11`)
	eventually(t, time.Minute, "the totals follow the lines", func() bool {
		return p.query(`SELECT count(*) FROM orders o WHERE total = (SELECT sum(price * amount) FROM order_line l WHERE l.order_id = o.id)`) == 10
	})
	eventually(t, time.Minute, "the batch is reduced", func() bool {
		return p.query(`SELECT count(*) FROM penstock.batch_status WHERE state = 'done' AND result = '5000'`) == 1
	})
	p.ended(time.Minute)
	if n := p.query(`SELECT count(*) FROM photo WHERE thumbnail = 'small/' || path`); n != 5000 {
		t.Errorf("%d photos have a thumbnail", n)
	}
	if n := p.query(`SELECT count(*) FROM penstock.failure`); n != 0 {
		t.Errorf("%d failures", n)
	}
}
