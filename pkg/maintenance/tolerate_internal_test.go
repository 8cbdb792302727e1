package maintenance

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// A right that is missing gave a line in each pass of each duty, for each queue.
func TestAStepThatIsRefusedInEachPassHasOneLine(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	denied := &pgconn.PgError{Code: "42501", Message: "permission denied"}
	c := Config{Log: slog.New(slog.NewTextHandler(&text, nil))}.withDefaults()
	step := func(queue string, err error) {
		if err := c.tolerate(t.Context(), err, readDue, "queue", queue); err != nil {
			t.Errorf("%v ends the pass", err)
		}
	}
	for range 100 {
		step("mails", denied)
		step("bills", denied)
		step("chats", nil)
	}
	step("bills", nil)
	lines := strings.Split(strings.TrimSpace(text.String()), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], `msg="a step works again" queue=bills step="read due entries"`) {
		t.Errorf("the log is %s, want a line for each of two queues, and one that bills are read again", text.String())
	}
}
