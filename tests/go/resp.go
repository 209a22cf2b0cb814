// A client of Redis for tests, which reports nil and errors as go-redis does.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
)

type replyError string

func (e replyError) Error() string { return string(e) }
func (e replyError) RedisError()   {}

// server has one connection, which it opens when a command needs it.
type server struct {
	address string
	mutex   sync.Mutex
	conn    net.Conn
	reader  *bufio.Reader
}

func newServer(address string) *server {
	found, err := url.Parse(address)
	if err != nil {
		panic(err)
	}
	return &server{address: found.Host}
}

func (s *server) do(ctx context.Context, args ...any) (any, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	reply, err := s.exchange(args)
	var refused replyError
	if err != nil && !errors.As(err, &refused) && s.conn != nil {
		s.conn.Close()
		s.conn = nil
	}
	return reply, err
}

func (s *server) exchange(args []any) (any, error) {
	if s.conn == nil {
		conn, err := net.Dial("tcp", s.address)
		if err != nil {
			return nil, err
		}
		s.conn, s.reader = conn, bufio.NewReader(conn)
	}
	out := fmt.Sprintf("*%d\r\n", len(args))
	for _, arg := range args {
		if content, isBytes := arg.([]byte); isBytes {
			arg = string(content)
		}
		out += fmt.Sprintf("$%d\r\n%s\r\n", len(arg.(string)), arg)
	}
	if _, err := io.WriteString(s.conn, out); err != nil {
		return nil, err
	}
	reply, err := s.read()
	if reply == nil && err == nil {
		err = replyError("redis: nil")
	}
	return reply, err
}

func (s *server) read() (any, error) {
	line, err := s.reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	kind, rest := line[0], line[1:len(line)-2]
	length, _ := strconv.Atoi(rest)
	switch {
	case kind == '+':
		return rest, nil
	case kind == '-':
		return nil, replyError(rest)
	case kind == ':':
		return int64(length), nil
	case length < 0:
		return nil, nil
	case kind == '$':
		content := make([]byte, length+2)
		_, err := io.ReadFull(s.reader, content)
		return string(content[:length]), err
	}
	items := make([]any, length)
	for i := range items {
		if items[i], err = s.read(); err != nil {
			return nil, err
		}
	}
	return items, nil
}
