/* A client for many streams on one thread: counts the events and the bytes of text that a server sends.

   stream_client PORT CONNECTIONS SECONDS PATH BODY

   Every connection asks once, with the same body; the answer is to last longer than the measurement. The clock runs
   from the moment when every connection has had its first event. One line of JSON at the end: seconds, events, bytes,
   how many connections had ended, and for each connection the letters it had when the clock began and when it stopped:
   from these the tokens are counted. No state but counters, so that what is measured is the server. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 17 };

typedef struct {
  int socket;
  int kept; /* bytes of an event that has not arrived whole */
  long events;
  long text, text_before;
  char tail[1 << 16];
} Stream;

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static int connect_to(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int socket_ = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(socket_, (struct sockaddr *)&address, sizeof address)) fail("connect");
  int yes = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return socket_;
}

/* Length of the JSON string that begins behind `text`; an escape counts as one. */
static long length_of(const char *text, const char *end) {
  long length = 0;
  for (; text < end && *text != '"'; ++text, ++length) text += *text == '\\';
  return length;
}

static long total_events, total_bytes;
static const char *markers[] = {"\"text\":\"", "\"content\":\""};

static void count(Stream *stream, char *data, long size) {
  static char joined[BUFFER + sizeof stream->tail];
  total_bytes += size;
  memcpy(joined, stream->tail, stream->kept);
  memcpy(joined + stream->kept, data, size);
  char *at = joined, *end = joined + stream->kept + size, *next;
  while ((next = memmem(at, end - at, "\n\n", 2)) != NULL) {
    char *event = memmem(at, next - at, "data: {", 7);
    if (event != NULL) {
      stream->events++, total_events++;
      for (int which = 0; which < 2; ++which) {
        char *text = memmem(event, next - event, markers[which], strlen(markers[which]));
        if (text != NULL) stream->text += length_of(text + strlen(markers[which]), next);
      }
    }
    at = next + 2;
  }
  stream->kept = end - at;
  if (stream->kept > (int)sizeof stream->tail) fail("an event is too long");
  memcpy(stream->tail, at, stream->kept);
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "stream_client PORT CONNECTIONS SECONDS PATH BODY\n");
    return 2;
  }
  const int port = atoi(argv[1]), num = atoi(argv[2]);
  const double seconds = atof(argv[3]);
  Stream *streams = calloc(num, sizeof *streams);
  int poll_ = epoll_create1(0), num_begun = 0, num_ended = 0;
  char request[4096];
  int length = snprintf(request, sizeof request,
                        "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                        argv[4], strlen(argv[5]), argv[5]);
  for (int i = 0; i < num; ++i) {
    streams[i].socket = connect_to(port);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &streams[i]};
    epoll_ctl(poll_, EPOLL_CTL_ADD, streams[i].socket, &event);
    if (write(streams[i].socket, request, length) != length) fail("write");
  }
  static char buffer[BUFFER];
  struct epoll_event ready[256];
  double start = 0, deadline = now() + 60;
  while (now() < deadline && num_ended < num) {
    const int count_ = epoll_wait(poll_, ready, 256, 0);
    for (int i = 0; i < count_; ++i) {
      Stream *stream = ready[i].data.ptr;
      const long had = stream->events;
      const long size = read(stream->socket, buffer, sizeof buffer);
      if (size <= 0) {
        close(stream->socket);
        num_ended++;
        continue;
      }
      count(stream, buffer, size);
      if (!had && stream->events && ++num_begun == num) {
        start = now(), deadline = start + seconds;
        total_events = total_bytes = 0;
        for (int each = 0; each < num; ++each) streams[each].text_before = streams[each].text;
        printf("{\"started\": true}\n");
        fflush(stdout);
      }
    }
  }
  if (!start) fail("not every connection had an event");
  printf("{\"seconds\": %.4f, \"events\": %ld, \"bytes\": %ld, \"ended\": %d, \"text\": [", now() - start, total_events,
         total_bytes, num_ended);
  for (int i = 0; i < num; ++i) printf("%s[%ld, %ld]", i ? ", " : "", streams[i].text_before, streams[i].text);
  printf("]}\n");
  return 0;
}
