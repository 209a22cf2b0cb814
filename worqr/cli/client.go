import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Do sends one command to the server. A reply is nil, an int64, a string, or []any of them. An error reply has the
// method RedisError(), as those of go-redis have; each other error is a lost connection. With go-redis, it is:
//
//	func(ctx context.Context, args ...any) (any, error) { return client.Do(ctx, args...).Result() }
type Do func(ctx context.Context, args ...any) (any, error)

var (
	// ErrUsage is a value that cannot be sent. Nothing was sent.
	ErrUsage = errors.New("usage error")
	// ErrUnavailable means that the server did not answer in time. The request may have taken effect.
	ErrUnavailable = errors.New("unavailable")
	// ErrQueueFull means that the queue is at its largest length. Nothing was stored.
	ErrQueueFull = errors.New("queue full")
	// ErrDuplicate means that the id is taken, and IfExists is Raise, or UniqueFor keeps it. Nothing was stored.
	ErrDuplicate = errors.New("duplicate")
	// ErrNoResult means that the job has no result: none was kept, it has expired, or the job is unknown.
	ErrNoResult = errors.New("no result")
	// ErrCancelled means that the job was cancelled. The text has the reason.
	ErrCancelled = errors.New("cancelled")
)

// JobFailed is the error of a job that has failed for good. Type is the class of the error in Python.
type JobFailed struct{ Type, Message, Traceback string }

func (e *JobFailed) Error() string { return e.Type + ": " + e.Message }

type unavailable struct{ cause error }

func (e *unavailable) Error() string {
	return fmt.Sprintf("the server did not answer in time: the request may have taken effect (%v)", e.cause)
}
func (e *unavailable) Is(target error) bool { return target == ErrUnavailable }
func (e *unavailable) Unwrap() error        { return e.cause }

func usage(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUsage, fmt.Sprintf(format, args...))
}

var sources = map[string]string{SOURCES_OF_SCRIPTS}
var later = regexp.MustCompile(`^(LOADING|BUSY|TRYAGAIN|MASTERDOWN|READONLY|CLUSTERDOWN) `) // soon it can be done

const (
	longestPatience = 40 * time.Minute // the server forgets after an hour what a producer has sent
	wireVersion     = "1"
)

// Settings of a client. The zero value has the defaults.
type Settings struct {
	// Patience is how long a request is sent again until it has an answer, up to 40 minutes. Default: 30 s.
	Patience time.Duration
	// Producer is the name of this producer, which no other process may have. Default: 128 random bits.
	Producer string
}

// Producer sends requests. A request is sent again until it has an answer, under its number, so the server does it
// once. Goroutines may share it.
type Producer struct {
	do        Do
	patience  time.Duration
	name      string
	mutex     sync.Mutex
	numbers   map[string]*numbers
	isChecked bool
}

type numbers struct {
	last int64
	open []int64 // in their order
}

// NewProducer returns a producer whose commands are sent by do.
func NewProducer(do Do, settings Settings) (*Producer, error) {
	if do == nil {
		return nil, usage("do must not be nil: pass a function that sends a command")
	}
	if settings.Patience < 0 {
		return nil, usage("Patience must be at least 0, not %v", settings.Patience)
	}
	if settings.Patience == 0 {
		settings.Patience = 30 * time.Second
	}
	if settings.Patience > longestPatience {
		settings.Patience = longestPatience
	}
	if settings.Producer == "" {
		name, err := random()
		if err != nil {
			return nil, err
		}
		settings.Producer = name
	}
	return &Producer{do: do, patience: settings.Patience, name: settings.Producer, numbers: map[string]*numbers{}}, nil
}

// Send runs a script that changes something on the queue with this key, once.
func (p *Producer) Send(ctx context.Context, script, base string, args ...any) ([]any, error) {
	number, lowest := p.open(base)
	defer p.close(base, number)
	return p.Ask(ctx, script, base, append([]any{p.name, fmt.Sprint(number), fmt.Sprint(lowest)}, args...)...)
}

func (p *Producer) open(base string) (number, lowest int64) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	of := p.numbers[base]
	if of == nil {
		of = &numbers{}
		p.numbers[base] = of
	}
	of.last++
	of.open = append(of.open, of.last)
	return of.last, of.open[0]
}

func (p *Producer) close(base string, number int64) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	of := p.numbers[base]
	i := sort.Search(len(of.open), func(i int) bool { return of.open[i] >= number })
	of.open = append(of.open[:i], of.open[i+1:]...)
}

// Ask runs a script that only reads.
func (p *Producer) Ask(ctx context.Context, script, base string, args ...any) ([]any, error) {
	source, isKnown := sources[script]
	if !isKnown {
		return nil, usage("there is no script %q", script)
	}
	if err := p.checkVersion(ctx); err != nil {
		return nil, err
	}
	sum := sha1.Sum([]byte(source))
	reply, err := p.untilAnswered(ctx, source, append([]any{"EVALSHA", hex.EncodeToString(sum[:]), "1", base}, args...))
	if err != nil {
		return nil, err
	}
	items, isList := reply.([]any)
	if !isList || len(items) == 0 {
		return nil, fmt.Errorf("the server answered %v", reply)
	}
	return items, nil
}

func (p *Producer) checkVersion(ctx context.Context) error {
	p.mutex.Lock()
	isChecked := p.isChecked
	p.mutex.Unlock()
	if isChecked {
		return nil
	}
	version, err := p.untilAnswered(ctx, "", []any{"GET", "{" + prefix + "}:version"})
	if err != nil {
		return err
	}
	if found := text(version); version != nil && found != wireVersion {
		return fmt.Errorf("the mesh has the wire version %s, this client %s: generate it again", found, wireVersion)
	}
	p.mutex.Lock()
	p.isChecked = true
	p.mutex.Unlock()
	return nil
}

func (p *Producer) untilAnswered(given context.Context, source string, command []any) (any, error) {
	ctx, cancel := context.WithTimeout(given, p.patience)
	defer cancel()
	began := time.Now().Round(0) // without the monotonic clock, which stops while the machine sleeps
	var last error
	for {
		reply, err := p.once(ctx, command)
		pause := 20 * time.Millisecond
		var refused interface{ RedisError() }
		switch isRefused := errors.As(err, &refused); {
		case err == nil:
			return reply, nil
		case !isRefused && ctx.Err() == nil:
			last = err
		case !isRefused:
		case err.Error() == "redis: nil": // as go-redis reports it
			return nil, nil
		case later.MatchString(err.Error()):
			last, pause = err, 100*time.Millisecond
		case command[0] == "EVALSHA" && strings.HasPrefix(err.Error(), "NOSCRIPT"):
			command, pause = append([]any{"EVAL", source}, command[2:]...), 0
		default:
			return nil, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		if err := given.Err(); err != nil {
			return nil, &unavailable{err}
		}
		if ctx.Err() != nil || time.Now().Round(0).Sub(began) > p.patience {
			return nil, &unavailable{fmt.Errorf("patience of %v; last error: %v", p.patience, last)}
		}
	}
}

// once sends a command, and does not wait longer than ctx, whatever the connection does.
func (p *Producer) once(ctx context.Context, command []any) (any, error) {
	type answer struct {
		reply any
		err   error
	}
	answered := make(chan answer, 1)
	go func() {
		reply, err := p.do(ctx, command...)
		answered <- answer{reply, err}
	}()
	select {
	case found := <-answered:
		return found.reply, found.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func random() (string, error) {
	bits := make([]byte, 16)
	if _, err := rand.Read(bits); err != nil {
		return "", fmt.Errorf("no random bits: %w", err)
	}
	return hex.EncodeToString(bits), nil
}

// What IfExists may be: what to do with a job of the same id that waits.
const (
	Update = "update"
	Skip   = "skip"
	Raise  = "raise"
	Cancel = "cancel"
)

// DispatchOptions are the options of one job. A zero value leaves an option out. Ptr(...) makes a pointer.
type DispatchOptions struct {
	// ID is the id of the job. Default: a new one.
	ID    string
	Delay time.Duration
	RunAt time.Time
	// Expires is the time after which the job is dropped if it has not started; ExpiresAt is the same as a moment.
	Expires   *time.Duration
	ExpiresAt time.Time
	// IfExists is Update, Skip, Raise or Cancel. Default: Update.
	IfExists string
	// UniqueFor is the time for which the id stays taken.
	UniqueFor time.Duration
	ResultTTL *time.Duration
	Timeout   *time.Duration
	Meta      map[string]string
	MaxLength *int64
	Lane      string
	Front     bool
	Tags      []string
}

// Ptr returns a pointer to a value, for what may be left out.
func Ptr[T any](value T) *T { return &value }

func (o DispatchOptions) wire(isSharded bool) (map[string]any, error) {
	if err := o.check(isSharded); err != nil {
		return nil, err
	}
	found, fields := map[string]any{}, map[string]any{}
	for name, value := range map[string]string{"id": o.ID, "exists": o.IfExists, "lane": o.Lane, "tags": strings.Join(o.Tags, "\n")} {
		if !utf8.ValidString(value) {
			return nil, usage("%s is no valid UTF-8: %q", name, value)
		}
		if value != "" {
			found[name] = value
		}
	}
	if o.Delay > 0 {
		found["delay"] = milliseconds(o.Delay)
	}
	if o.UniqueFor > 0 {
		found["unique_for"] = milliseconds(o.UniqueFor)
	}
	if !o.RunAt.IsZero() {
		found["run_at"] = o.RunAt.UnixMilli()
	}
	if o.Expires != nil {
		found["expires"] = fmt.Sprint(milliseconds(*o.Expires))
	}
	if !o.ExpiresAt.IsZero() {
		found["expires_at"] = fmt.Sprint(o.ExpiresAt.UnixMilli())
	}
	if o.MaxLength != nil {
		found["max_length"] = *o.MaxLength
	}
	if o.Front {
		found["front"] = true
	}
	for name, value := range map[string]*time.Duration{"result_ttl": o.ResultTTL, "timeout": o.Timeout} {
		if value != nil {
			fields[name] = fmt.Sprint(milliseconds(*value))
		}
	}
	if len(fields) > 0 {
		found["fields"] = fields
	}
	return o.withMeta(found)
}

// withTags returns the tags of the function, and those of the dispatch.
func withTags(declared, given []string) []string {
	for _, tag := range given {
		if !strings.Contains("\n"+strings.Join(declared, "\n")+"\n", "\n"+tag+"\n") {
			declared = append(declared, tag)
		}
	}
	return declared
}

func (o DispatchOptions) withMeta(found map[string]any) (map[string]any, error) {
	if o.Meta == nil {
		return found, nil
	}
	meta, err := encoded(o.Meta, "Meta")
	found["meta"] = string(meta)
	return found, err
}

func (o DispatchOptions) check(isSharded bool) error {
	zero := time.Duration(0)
	for name, value := range map[string]*time.Duration{
		"Delay": &o.Delay, "UniqueFor": &o.UniqueFor, "Expires": o.Expires, "ResultTTL": o.ResultTTL, "Timeout": o.Timeout,
	} {
		if value != nil && *value < zero {
			return usage("%s must be at least 0, not %v", name, *value)
		}
	}
	for name, moment := range map[string]time.Time{"RunAt": o.RunAt, "ExpiresAt": o.ExpiresAt} {
		if !moment.IsZero() && (moment.UnixMilli() < 0 || moment.Year() > 9999) {
			return usage("%s is %v, and must be in the years 1970 to 9999", name, moment)
		}
	}
	for _, tag := range o.Tags {
		if tag == "" || strings.Contains(tag, "\n") {
			return usage("Tags has %q: a tag is a text of one line", tag)
		}
	}
	switch {
	case o.MaxLength != nil && *o.MaxLength < 0:
		return usage("MaxLength must be at least 0, not %d", *o.MaxLength)
	case isSharded && (o.ID != "" || o.UniqueFor > 0 || o.Lane != ""):
		return usage("the function has several shards: leave out ID, UniqueFor and Lane")
	case o.UniqueFor > 0 && o.ID == "":
		return usage("UniqueFor needs an ID: it is the id that stays taken")
	case o.Delay > 0 && !o.RunAt.IsZero():
		return usage("a dispatch takes a Delay or a RunAt, not both")
	case o.Expires != nil && !o.ExpiresAt.IsZero():
		return usage("a dispatch takes Expires or ExpiresAt, not both")
	case !strings.Contains(" update skip raise cancel ", " "+o.IfExists+" ") && o.IfExists != "":
		return usage("IfExists must be Update, Skip, Raise or Cancel, not %q", o.IfExists)
	}
	return nil
}

// milliseconds rounds up, so that a time above 0 does not become 0.
func milliseconds(duration time.Duration) int64 {
	return int64((duration + time.Millisecond - 1) / time.Millisecond)
}

// packed returns MessagePack of what the options of a job are made of.
func packed(value any) []byte {
	head := func(code byte, length int) []byte { return binary.BigEndian.AppendUint32([]byte{code}, uint32(length)) }
	switch value := value.(type) {
	case bool:
		if value {
			return []byte{0xc3}
		}
		return []byte{0xc2}
	case int64:
		return binary.BigEndian.AppendUint64([]byte{0xd3}, uint64(value))
	case string:
		return append(head(0xdb, len(value)), value...)
	case map[string]any:
		names := make([]string, 0, len(value))
		for name := range value {
			names = append(names, name)
		}
		sort.Strings(names)
		out := head(0xdf, len(value))
		for _, name := range names {
			out = append(append(out, packed(name)...), packed(value[name])...)
		}
		return out
	}
	panic(fmt.Sprintf("no option of a job is a %T", value))
}

// Status says how far a job is.
type Status struct {
	// State is waiting, scheduled, suspended, blocked, active, finished, failed, cancelled or gone.
	State              string
	Worker             string
	RunAt              *time.Time
	Progress           *float64
	Message            string
	Failures, Attempts int64
	// Error is what the last run raised, without its traceback.
	Error *JobFailed
}

// Job is one job, whose result is an R.
type Job[R any] struct {
	producer     *Producer
	base, number string
	ID           string
	// Outcome is what the dispatch did: created, updated, blocked or unchanged; empty for a job of which only the id is known.
	Outcome string
}

// Status returns how far the job is.
func (j *Job[R]) Status(ctx context.Context) (*Status, error) {
	reply, err := j.producer.Ask(ctx, "job_status", j.base, j.number, j.ID)
	if err != nil {
		return nil, err
	}
	found := &Status{State: text(item(reply, 0)), Worker: text(item(reply, 2)), Message: text(item(reply, 5))}
	if found.State == "due" {
		found.State = "scheduled"
	}
	if ms, err := strconv.ParseFloat(text(item(reply, 3)), 64); err == nil {
		found.RunAt = Ptr(time.UnixMilli(int64(ms)))
	}
	if progress, err := strconv.ParseFloat(text(item(reply, 4)), 64); err == nil {
		found.Progress = &progress
	}
	found.Failures, _ = strconv.ParseInt(text(item(reply, 6)), 10, 64)
	found.Attempts, _ = strconv.ParseInt(text(item(reply, 7)), 10, 64)
	if kind := text(item(reply, 8)); kind != "" {
		found.Error = &JobFailed{Type: kind, Message: text(item(reply, 9))}
	}
	return found, nil
}

// Result waits until the job has ended, and returns what the function returned. It asks the server, soon once a second.
// If ctx ends before, the error is that of ctx. Other errors are *JobFailed, ErrCancelled and ErrNoResult.
func (j *Job[R]) Result(ctx context.Context) (R, error) {
	var none R
	for pause := 10 * time.Millisecond; ; pause *= 2 {
		reply, err := j.producer.Ask(ctx, "read_result", j.base, j.number, j.ID)
		if err != nil && ctx.Err() != nil {
			return none, fmt.Errorf("the job %s had not ended: %w", j.ID, ctx.Err())
		} else if err != nil {
			return none, err
		}
		first, second := text(item(reply, 1)), text(item(reply, 2))
		switch word := text(reply[0]); word {
		case "finished":
			return decoded[R](first, second)
		case "failed":
			return none, &JobFailed{first, second, text(item(reply, 3))}
		case "cancelled":
			return none, fmt.Errorf("%w: %s", ErrCancelled, first)
		case "wait":
		default:
			return none, fmt.Errorf("%w: the job %s has none: %s; a function keeps results with result_ttl", ErrNoResult, j.ID, word)
		}
		if pause > time.Second {
			pause = time.Second
		}
		select {
		case <-ctx.Done():
			return none, fmt.Errorf("the job %s had not ended: %w", j.ID, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// Cancel cancels the job. True if it waited and is deleted, or runs and its worker was told.
func (j *Job[R]) Cancel(ctx context.Context, reason string) (bool, error) {
	if !utf8.ValidString(reason) {
		return false, usage("the reason is no valid UTF-8: %q", reason)
	}
	reply, err := j.producer.Send(ctx, "cancel_job", j.base, j.ID, reason)
	if err != nil {
		return false, err
	}
	if word := text(reply[0]); word != "ok" {
		return false, fmt.Errorf("the server answered %s: nothing was cancelled", word)
	}
	return text(item(reply, 1)) != "0" || len(reply) > 2, nil
}

func decoded[R any](kind, value string) (result R, err error) {
	if kind == "none" {
		return result, nil
	}
	if kind == "bytes" {
		switch target := any(&result).(type) {
		case *[]byte:
			*target = []byte(value)
		case **[]byte:
			*target = Ptr([]byte(value))
		case *any:
			*target = []byte(value)
		default:
			return result, fmt.Errorf("the result is bytes, and not a %T: generate the client again", result)
		}
		return result, nil
	}
	if strings.HasPrefix(value, "\xc1") { // which begins no JSON
		return result, errors.New("the result was encoded by the codec of the mesh, which this client does not have: read it in Python")
	}
	reader := json.NewDecoder(strings.NewReader(value))
	reader.UseNumber() // an integer in a value of any type keeps its digits
	if err := reader.Decode(&result); err != nil {
		return result, fmt.Errorf("the result is no %T: %w", result, err)
	}
	return result, nil
}

func item(reply []any, i int) any {
	if i < len(reply) {
		return reply[i]
	}
	return nil
}

func text(value any) string {
	switch value := value.(type) {
	case nil:
		return ""
	case []byte:
		return string(value)
	}
	return fmt.Sprint(value)
}

// Jobs sends the calls of a function as jobs.
type Jobs[A, R any] struct {
	producer         *Producer
	name             string
	isRaw, isSharded bool
	options          map[string]any
}

// Task sends the calls of a function, as jobs or as plain tasks.
type Task[A, R any] struct{ Jobs[A, R] }

// Enqueue enqueues a call as a plain task, which costs least and has no handle; as a job, if the function keeps jobs or
// has tags.
func (t *Task[A, R]) Enqueue(ctx context.Context, args A) error {
	if t.options["done"] != nil || t.options["tags"] != nil {
		_, err := t.Dispatch(ctx, args, DispatchOptions{})
		return err
	}
	payload, err := t.payload(args)
	if err != nil {
		return err
	}
	bound, isBounded := t.options["max_length"].(int64)
	if !isBounded {
		bound = -1
	}
	reply, err := t.producer.Send(ctx, "enqueue", t.base(), fmt.Sprint(bound), "0", payload)
	if err != nil {
		return err
	}
	switch word := text(reply[0]); word {
	case "ok":
		return nil
	case "full":
		return fmt.Errorf("%w: %s tasks wait in %s: nothing was stored", ErrQueueFull, text(item(reply, 1)), t.name)
	default:
		return fmt.Errorf("the server answered %s", word)
	}
}

// Dispatch dispatches a call as a job, with an id, and with a result if the function keeps results.
func (t *Jobs[A, R]) Dispatch(ctx context.Context, args A, options DispatchOptions) (*Job[R], error) {
	payload, err := t.payload(args)
	if err != nil {
		return nil, err
	}
	if declared, isTagged := t.options["tags"].(string); isTagged {
		options.Tags = withTags(strings.Split(declared, "\n"), options.Tags)
	}
	wire, err := options.wire(t.isSharded)
	if err != nil {
		return nil, err
	}
	for name, value := range t.options {
		if _, isGiven := wire[name]; !isGiven {
			wire[name] = value
		}
	}
	if options.ID == "" {
		if wire["random"], err = random(); err != nil {
			return nil, err
		}
	}
	reply, err := t.producer.Send(ctx, "dispatch_jobs", t.base(), "0", packed(wire), payload)
	if err != nil {
		return nil, err
	}
	if word := text(reply[0]); word != "ok" {
		return nil, fmt.Errorf("the server answered %s: nothing was stored", word)
	}
	made, _ := item(reply, 1).([]any)
	outcome, id := text(item(made, 0)), text(item(made, 1))
	switch outcome {
	case "full":
		return nil, fmt.Errorf("%w: %s is at its largest length: nothing was stored", ErrQueueFull, t.name)
	case "duplicate":
		return nil, fmt.Errorf("%w: the id %s is taken in %s: nothing was stored", ErrDuplicate, id, t.name)
	}
	return &Job[R]{t.producer, t.base(), text(item(made, 2)), id, outcome}, nil
}

// Job returns the newest job with this id.
func (t *Jobs[A, R]) Job(id string) *Job[R] { return &Job[R]{t.producer, t.base(), "0", id, ""} }

func (t *Jobs[A, R]) base() string { return prefix + ":{" + t.name + "}" }

func (t *Jobs[A, R]) payload(args A) ([]byte, error) {
	if t.isRaw {
		return any(args).([]byte), nil
	}
	return encoded(args, t.name)
}

// encoded returns JSON as the worker reads it: nil slices and maps are empty ones, and an optional field that is nil is left out.
func encoded(value any, path string) ([]byte, error) {
	out := &bytes.Buffer{}
	err := encode(out, reflect.ValueOf(value), path)
	return out.Bytes(), err
}

var home = reflect.TypeOf(Settings{}).PkgPath()

// choice is a type that has only some values.
type choice interface{ values() []any }

func encode(out *bytes.Buffer, value reflect.Value, path string) error {
	if len(path) > 10_000 {
		return usage("%s... is nested too deeply", path[:100])
	}
	if !value.IsValid() {
		out.WriteString("null")
		return nil
	}
	if value.Kind() == reflect.Pointer || value.Kind() == reflect.Interface {
		return encode(out, value.Elem(), path)
	}
	if isDone, err := encodeOwn(out, value, path); isDone || err != nil {
		return err
	}
	switch value.Kind() {
	case reflect.String:
		if !utf8.ValidString(value.String()) {
			return usage("%s is no valid UTF-8: %q", path, value.String())
		}
	case reflect.Float32, reflect.Float64:
		if math.IsNaN(value.Float()) || math.IsInf(value.Float(), 0) {
			return usage("%s is %v, which JSON does not know", path, value.Float())
		}
	case reflect.Slice, reflect.Array:
		return encodeList(out, value, path)
	case reflect.Map:
		return encodeMap(out, value, path)
	case reflect.Struct:
		return encodeStruct(out, value, path)
	}
	return encodeStandard(out, value, path)
}

// encodeOwn encodes what has an encoding of its own, and is true if it has done so.
func encodeOwn(out *bytes.Buffer, value reflect.Value, path string) (bool, error) {
	switch own := value.Interface().(type) {
	case time.Time:
		if own.Year() < 1 || own.Year() > 9999 {
			return true, usage("%s is %v, and must be in the years 1 to 9999", path, own)
		}
		return true, encodeStandard(out, value, path)
	case json.Marshaler:
		return true, encodeStandard(out, value, path)
	case json.Number:
		return true, encodeStandard(out, value, path)
	case []byte:
		out.WriteString(`"` + base64.StdEncoding.EncodeToString(own) + `"`)
		return true, nil
	case choice:
		allowed := own.values()
		if len(allowed) == 1 && value.IsZero() { // the tag of a class
			return true, encode(out, reflect.ValueOf(allowed[0]), path)
		}
		for _, each := range allowed {
			if fmt.Sprint(each) == fmt.Sprint(value) {
				return false, nil
			}
		}
		return true, usage("%s is %q, and must be one of %q", path, fmt.Sprint(value), allowed)
	}
	return false, nil
}

func encodeStandard(out *bytes.Buffer, value reflect.Value, path string) error {
	found, err := json.Marshal(value.Interface())
	if err != nil {
		return usage("%s is %v: %v", path, value, err)
	}
	out.Write(found)
	return nil
}

func encodeList(out *bytes.Buffer, value reflect.Value, path string) error {
	out.WriteByte('[')
	for i := 0; i < value.Len(); i++ {
		if i > 0 {
			out.WriteByte(',')
		}
		if err := encode(out, value.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
			return err
		}
	}
	out.WriteByte(']')
	return nil
}

func encodeMap(out *bytes.Buffer, value reflect.Value, path string) error {
	if value.Type().Key().Kind() != reflect.String {
		return usage("%s is a %v: a map has texts as keys", path, value.Type())
	}
	out.WriteByte('{')
	for i, each := 0, value.MapRange(); each.Next(); i++ {
		if i > 0 {
			out.WriteByte(',')
		}
		if err := encode(out, each.Key(), path); err != nil {
			return err
		}
		out.WriteByte(':')
		if err := encode(out, each.Value(), path+"."+each.Key().String()); err != nil {
			return err
		}
	}
	out.WriteByte('}')
	return nil
}

func encodeStruct(out *bytes.Buffer, value reflect.Value, path string) error {
	if where := value.Type().PkgPath(); where != home && where != "" {
		return encodeStandard(out, value, path)
	}
	out.WriteByte('{')
	isFirst := true
	for i := 0; i < value.NumField(); i++ {
		tag := value.Type().Field(i).Tag.Get("json")
		name := strings.TrimSuffix(tag, ",omitempty")
		if field := value.Field(i); name != tag && field.IsZero() {
			continue
		}
		if !isFirst {
			out.WriteByte(',')
		}
		isFirst = false
		name = strings.TrimSuffix(name, ",")
		if err := encode(out, reflect.ValueOf(name), path); err != nil {
			return err
		}
		out.WriteByte(':')
		if err := encode(out, value.Field(i), path+"."+name); err != nil {
			return err
		}
	}
	out.WriteByte('}')
	return nil
}
